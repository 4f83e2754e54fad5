"""From the host to the device: all tensors that a pass needs, in one copy.

Shape letters: N rows, T tokens, n losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from llm_fed.engine.deltas import DeltaHook
from llm_fed.engine.tokens import TokenGroups

Item = TypeVar("Item")
_ALIGNED = 16  # bytes


@dataclass(frozen=True)
class Laid:
    """A micro-batch of N rows and n losses with all that the device is given for it.

    Where its examples lie end to end, `groups` says which tokens go through which of the G adapters of `index` (G,),
    and `mix` is (tokens, E).
    """

    batch: Any  # `examples.Batch`
    index: Tensor  # (N,) the row of the bank that each goes through
    owner: Tensor  # (n,) the same of each loss
    weights: Tensor  # (n,) what each loss counts
    into: Tensor  # (N,) the example that each row belongs to
    owners: Sequence[int]  # the row of the bank of each example, for the host
    mix: Tensor | None = None  # (N, E)
    columns: Tensor | None = None  # (examples, numbers): what a loss of one's own is given, see `own_losses`
    masks: Tensor | None = None  # of dropout
    wanted: Tensor | None = None  # (targets, C) the teachers' logits
    below: Mapping[str, DeltaHook] = field(default_factory=dict)  # what lies beneath the adapters, by layer
    groups: TokenGroups | None = None


def on_device(laid: Item, device: torch.device) -> Item:
    """A dataclass with its tensors on a device, also those of dataclasses in it. From a CPU to another device they
    travel as one buffer, so that the host asks for one copy."""
    here = list(_tensors(laid))
    if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in here):
        return _with(laid, iter([tensor.to(device) for tensor in here]))
    return _with(laid, _views(_buffer(here, device).to(device, non_blocking=True), here))


class Static(Generic[Item]):
    """Memory of a device that takes the tensors of one dataclass after another, all of equal shapes.

    Attributes:
        laid: the dataclass with its tensors there, always the same ones.
    """

    def __init__(self, like: Item, device: torch.device):
        here = list(_tensors(like))
        self._memory = torch.zeros(_places(here)[1], dtype=torch.uint8, device=device)
        self.laid = _with(like, _views(self._memory, here))

    def fill(self, laid: Item) -> None:
        """Copy what lies on the host, without waiting for it."""
        self._memory.copy_(_buffer(list(_tensors(laid)), self._memory.device), non_blocking=True)


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where in a buffer each of these begins, and its size."""
    places, size = [], 0
    for tensor in tensors:
        places.append(size)
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return places, size


def _buffer(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of the host, one behind the other, in memory from which `device` can copy."""
    places, size = _places(tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, tensor in zip(places, tensors, strict=True):
        buffer[place : place + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
    return buffer


def _views(buffer: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    return iter(
        [
            buffer[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(_places(like)[0], like, strict=True)
        ]
    )


def _tensors(laid: Any) -> Iterator[Tensor]:
    if isinstance(laid, Tensor):
        yield laid
    elif is_dataclass(laid) and not isinstance(laid, type):
        for field in fields(laid):
            yield from _tensors(getattr(laid, field.name))


def _with(laid: Any, moved: Iterator[Tensor]) -> Any:
    if isinstance(laid, Tensor):
        return next(moved)
    if is_dataclass(laid) and not isinstance(laid, type):
        return replace(laid, **{field.name: _with(getattr(laid, field.name), moved) for field in fields(laid)})
    return laid
