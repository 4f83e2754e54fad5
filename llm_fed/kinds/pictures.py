"""Pictures as the engine sees them.

Shape letters: N pictures, C classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.engine.examples import Examples
from llm_fed.models.frozen import freeze
from llm_fed.models.joined import Answer, full, respond
from llm_fed.models.lora import Lora, targets
from llm_fed.models.trained import Structure
from llm_fed.state import State
from llm_fed.tasks.common import Picture, labels_of, pixels_of

if TYPE_CHECKING:
    from llm_fed.kinds.images import Images

PATCH = 16  # pixels


@dataclass(frozen=True)
class PictureBatch:
    """Labelled images; every row is one target."""

    pixels: Tensor  # (N, 1 or 3, H, W) uint8
    labels: Tensor  # (N,)

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.labels))


@dataclass(frozen=True)
class Pictures(Examples):
    """Pictures of an image base; the label of each is its one target."""

    single: ClassVar[bool] = True

    base: Images
    tokens: int  # that a picture counts as, see `of`
    last: str  # the name of the last linear layer
    head: State | None = None  # a linear head (weight, bias) in the place of the model's own

    @classmethod
    def of(cls, base: Images, structure: Structure) -> Pictures:
        """A picture counts as the most tokens that it is in any adapted layer - in a ViT its patches and one more - and
        at least as one token for 16 x 16 pixels, so that layers after a pooling do not make a picture look free.

        Raises:
            UserError: an adapted layer does not read one row per picture, hence cannot know whose adapter is whose.
        """
        most, seen = max(1, (base.size // PATCH) ** 2), {}
        adapted = targets(base.model, structure) if isinstance(structure, Lora) and structure.target_modules else {}
        handles = [
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].shape}))
            for name, module in adapted.items()
        ]
        try:
            if adapted:
                freeze(base.model)
                with torch.inference_mode():
                    base.model(base.prepare(base.blank()))
        finally:
            for handle in handles:
                handle.remove()
        for name, shape in seen.items():
            if shape[0] != 2:
                raise UserError(
                    f"adapter.target_modules matches {name} of {base.name!r}, which reads {shape[0] // 2} rows per "
                    "picture, where an adapter needs one; choose other layers"
                )
            most = max(most, shape[1:-1].numel())
        return cls(base, most, base.head_in(structure))

    def length(self, picture: Picture) -> int:
        return self.tokens

    def num_targets(self, pictures: Sequence[Picture]) -> int:
        return len(pictures)

    def collate(self, pictures: Sequence[Picture]) -> PictureBatch:
        return PictureBatch(pixels_of(pictures), labels_of(pictures))

    def answer(self, model: Any, batch: PictureBatch) -> Answer:
        return respond(model, self.base.prepare(batch.pixels), self.last)

    def under_head(self, head: State) -> Pictures:
        return replace(self, head=head)

    def logits(self, model: Any, batch: PictureBatch, *, all_rows: bool = False) -> Tensor:
        """(N, C); all rows always go through the head."""
        answer = self.answer(model, batch)
        logits = answer.logits
        if self.head is not None:
            weight, bias = (tensor.to(answer.features) for tensor in self.head.tensors().values())
            logits = nn.functional.linear(answer.features, weight, bias)
        return full(logits)
