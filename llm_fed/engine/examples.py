"""The two kinds of examples that adapters train on, tokens and pictures: what the fused loops must know of them.

Shape letters: N rows, T tokens, n targets, C classes or words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.engine.masks import known_masks
from llm_fed.engine.packing import Example, MicroBatch, collate, num_targets
from llm_fed.models.frozen import freeze
from llm_fed.models.joined import full, respond
from llm_fed.models.lora import Lora, targets
from llm_fed.models.rotary import regimes, row_positions
from llm_fed.state import State
from llm_fed.tasks.common import Picture, labels_of, pixels_of

if TYPE_CHECKING:
    from llm_fed.models.images import ImageBase

PATCH = 16  # pixels


class Batch(Protocol):
    """Examples side by side, on the CPU."""

    @property
    def labels(self) -> Tensor: ...  # (n,) what is to be predicted

    @property
    def rows(self) -> Tensor: ...  # (n,) the row of each


class Kind(Protocol):
    """What differs between examples that are tokens and examples that are pictures."""

    single: ClassVar[bool]  # whether an example is one target, so that logits of all examples can be kept

    def length(self, example: Any) -> int:
        """How many tokens of an example reach the adapted layers: what it costs, and the length of its dropout mask."""
        ...

    def num_targets(self, examples: Sequence[Any]) -> int:
        """How many predictions of these examples count in the loss."""
        ...

    def collate(self, examples: Sequence[Any]) -> Any:
        """The examples as a `Batch` for `logits`."""
        ...

    def logits(self, model: Any, batch: Any, *, all_rows: bool = False) -> Tensor:
        """What the model predicts in the place of each target, (n, C), in float32 at least.

        Args:
            all_rows: an adapter or head of its own belongs to each row of the last layer's inputs.
        """
        ...


class Text:
    """Token sequences (`packing.Example`) of a causal language model; each target token is one target."""

    single: ClassVar[bool] = False

    num_targets = staticmethod(num_targets)
    collate = staticmethod(collate)

    def length(self, example: Example) -> int:
        return len(example.input_ids)

    def logits(self, model: Any, batch: MicroBatch, *, all_rows: bool = False) -> Tensor:
        """(n, vocabulary) in float32, as transformers computes its loss.

        Only the hidden states that predict a target token go through the language-model head, which saves most of
        its work where responses are short; with `all_rows` (an adapted head needs all N rows) all of them do.
        No attention mask is given: with causal attention, padding on the right reaches no real token.
        """
        places = batch.places.to(model.device)

        def keep_predicting(head: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
            return inputs[0].flatten(0, 1).index_select(0, places.to(inputs[0].device)).unsqueeze(0)

        with ExitStack() as stack:
            if not all_rows:
                handle = model.get_output_embeddings().register_forward_pre_hook(keep_predicting)
                stack.callback(handle.remove)
            stack.enter_context(known_masks())
            inputs = inputs_of(model, batch.input_ids, batch.lengths)
            logits = model(**inputs, use_cache=False).logits.flatten(0, 1)
        if all_rows:
            logits = logits.index_select(0, places)
        return logits.float()


TEXT = Text()


def inputs_of(model: Any, input_ids: Tensor, lengths: Tensor) -> dict[str, Tensor]:
    """What a model is given of rows (N, T) that are padded on the right, on its device: with positions where its
    rotary embeddings look at the length of a row."""
    inputs = {"input_ids": input_ids}
    its, width = regimes(model), input_ids.shape[1]
    if its is not None and width > its.border:
        inputs["position_ids"] = row_positions(lengths, width)
    return {name: value.to(model.device) for name, value in inputs.items()}


@dataclass(frozen=True)
class PictureBatch:
    """Labelled images; every row is one target."""

    pixels: Tensor  # (N, 1 or 3, H, W) uint8
    labels: Tensor  # (N,)

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.labels))


@dataclass(frozen=True)
class Pictures:
    """Pictures of an image base; the label of each is its one target."""

    single: ClassVar[bool] = True

    base: ImageBase
    tokens: int  # that a picture counts as, see `of`
    head: State | None = None  # a linear head (weight, bias) in the place of the model's own

    @classmethod
    def of(cls, base: ImageBase, structure: Lora) -> Pictures:
        """A picture counts as the most tokens that it is in any adapted layer - in a ViT its patches and one more - and
        at least as one token for 16 x 16 pixels, so that layers after a pooling do not make a picture look free.

        Raises:
            UserError: an adapted layer does not read one row per picture, hence cannot know whose adapter is whose.
        """
        most, seen = max(1, (base.size // PATCH) ** 2), {}
        handles = [
            module.register_forward_pre_hook(lambda _, inputs, name=name: seen.update({name: inputs[0].shape}))
            for name, module in targets(base.model, structure).items()
        ]
        try:
            freeze(base.model)
            with torch.inference_mode():
                base.model(pixel_values=base.prepare(torch.zeros(2, 3, base.size, base.size, dtype=torch.uint8)))
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
        return cls(base, most)

    def length(self, picture: Picture) -> int:
        return self.tokens

    def num_targets(self, pictures: Sequence[Picture]) -> int:
        return len(pictures)

    def collate(self, pictures: Sequence[Picture]) -> PictureBatch:
        return PictureBatch(pixels_of(pictures), labels_of(pictures))

    def logits(self, model: Any, batch: PictureBatch, *, all_rows: bool = False) -> Tensor:
        """(N, C); all rows always go through the head."""
        answer = respond(model, self.base.prepare(batch.pixels), self.base.head)
        logits = answer.logits
        if self.head is not None:
            weight, bias = (tensor.to(answer.features) for tensor in self.head.tensors().values())
            logits = nn.functional.linear(answer.features, weight, bias)
        return full(logits)
