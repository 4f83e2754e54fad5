"""From the host to the device: all tensors that a pass needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")


def on_device(item: Item, device: torch.device) -> Item:
    """A dataclass with its tensors on a device, also those of dataclasses in it; nobody waits for it."""
    return _mapped(item, lambda tensor: _pinned(tensor, device).to(device, non_blocking=True))


class Static(Generic[Item]):
    """Memory of a device that takes the tensors of one dataclass after another, all of equal shapes.

    Attributes:
        item: the dataclass with its tensors there, always the same ones.
    """

    def __init__(self, like: Item, device: torch.device):
        self.item = _mapped(like, lambda tensor: torch.zeros_like(tensor, device=device))
        self._own = list(_tensors(self.item))

    def fill(self, item: Item) -> None:
        """Copy what lies on the host, without waiting for it."""
        for own, given in zip(self._own, _tensors(item), strict=True):
            own.copy_(_pinned(given, own.device), non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In memory of the host from which a GPU can copy by itself."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def _mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{field.name: _mapped(getattr(item, field.name), change) for field in fields(item)})
    return item


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from _tensors(getattr(item, field.name))
