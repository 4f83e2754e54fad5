"""From the host to the device: all tensors that a pass needs, in one copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Laid = TypeVar("Laid")
_ALIGNED = 16  # bytes


def on_device(laid: Laid, device: torch.device) -> Laid:
    """A dataclass with its tensors on a device, also those of dataclasses in it. From a CPU to another device they
    travel as one buffer, so that the host asks for one copy."""
    here = list(_tensors(laid))
    if device.type == "cpu" or any(tensor.device.type != "cpu" for tensor in here):
        return _with(laid, iter([tensor.to(device) for tensor in here]))
    places, size = [], 0
    for tensor in here:
        places.append(size)
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for place, tensor in zip(places, here, strict=True):
        buffer[place : place + tensor.nbytes] = tensor.contiguous().flatten().view(torch.uint8)
    moved = buffer.to(device, non_blocking=True)
    return _with(
        laid,
        iter(
            [
                moved[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                for place, tensor in zip(places, here, strict=True)
            ]
        ),
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
