"""From the host to the device: all tensors that a pass needs, in one copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
_ALIGNED = 16  # bytes


def on_device(item: Item, device: torch.device) -> Item:
    """A dataclass with its tensors on a device, also those of dataclasses in it. From a CPU to another device they
    travel as one buffer, so that the host asks for one copy."""
    here = list(_tensors(item))
    if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in here):
        return _with(item, iter([tensor.to(device) for tensor in here]))
    return _with(item, _views(_buffer(here, device).to(device, non_blocking=True), here))


class Static(Generic[Item]):
    """Memory of a device that takes the tensors of one dataclass after another, all of equal shapes.

    Attributes:
        item: the dataclass with its tensors there, always the same ones.
    """

    def __init__(self, like: Item, device: torch.device):
        here = list(_tensors(like))
        self._memory = torch.zeros(_places(here)[1], dtype=torch.uint8, device=device)
        self.item = _with(like, _views(self._memory, here))

    def fill(self, item: Item) -> None:
        """Copy what lies on the host, without waiting for it."""
        self._memory.copy_(_buffer(list(_tensors(item)), self._memory.device), non_blocking=True)


def _places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where in a buffer each of these begins, and its size."""
    indices, size = [], 0
    for tensor in tensors:
        indices.append(size)
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    return indices, size


def _buffer(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors of the host, one behind the other, in memory from which `device` can copy."""
    indices, size = _places(tensors)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for index, tensor in zip(indices, tensors, strict=True):
        buffer[index : index + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
    return buffer


def _views(buffer: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    return iter(
        [
            buffer[index : index + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for index, tensor in zip(_places(like)[0], like, strict=True)
        ]
    )


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from _tensors(vars(item)[field.name])


def _with(item: Any, moved: Iterator[Tensor]) -> Any:
    if isinstance(item, Tensor):
        return next(moved)
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{field.name: _with(vars(item)[field.name], moved) for field in fields(item)})
    return item
