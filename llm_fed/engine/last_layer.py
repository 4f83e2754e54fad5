"""What the last layer of a language model is given, so that a loss can be had without all its logits.

Shape letters: n target tokens, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from llm_fed.method.losses import head_losses

_CHANGES_LOGITS: WeakSet[nn.Module] = WeakSet()  # models that change what their last layer gives, by a scale for one


@dataclass
class LastLayer:
    """The last layer of a model, which is not computed: a stand-in takes the place of the logits.

    Attributes:
        inputs: (1, n, H) what the layer was given.
        stand_in: (1, n, V) of the layer's output, which has no memory.
    """

    layer: nn.Linear
    inputs: Tensor = field(default_factory=lambda: torch.empty(0))
    stand_in: Tensor = field(default_factory=lambda: torch.empty(0))

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = self.layer.weight
        self.inputs = inputs
        self.stand_in = weight.new_empty(()).expand(*inputs.shape[:-1], len(weight))
        return self.stand_in

    def gives(self, logits: Tensor) -> bool:
        """Whether these logits of the model are what the layer gave, and nothing was made of it."""
        return logits.untyped_storage()._cdata == self.stand_in.untyped_storage()._cdata

    def losses(self, labels: Tensor) -> Tensor:
        """(n,): see `head_losses`."""
        weight = self.layer.weight
        return head_losses(self.inputs.flatten(0, 1).to(weight.dtype), weight, self.layer.bias, labels)


def last_layer(model: Any) -> LastLayer | None:
    """The last layer, where losses can be computed from its inputs: it is linear, frozen, on a CPU, computes in its own
    dtype, and nobody listens to it; None elsewhere."""
    layer = model.get_output_embeddings()
    if type(layer) is not nn.Linear or layer.weight.device.type != "cpu" or model in _CHANGES_LOGITS:
        return None
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else layer.weight.dtype
    if layer.weight.requires_grad or layer.weight.dtype != autocast:
        return None
    # Hooks would hear of the stand-in, and accelerate replaces the forward where weights are somewhere else.
    return None if layer._forward_hooks or "forward" in vars(layer) else LastLayer(layer)


@contextmanager
def in_place_of(last: LastLayer) -> Iterator[None]:
    """Within, the layer gives the stand-in."""
    last.layer.forward = last  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del last.layer.forward


def remember(model: nn.Module) -> None:
    """That this model changes logits, so that nobody tries again."""
    _CHANGES_LOGITS.add(model)
