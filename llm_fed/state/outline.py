"""Messages are trees: dictionaries and lists whose leaves are states, tensors, numbers, texts or None. A skeleton is
what one is made of without its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from llm_fed.state import State

Leaf: TypeAlias = State | Tensor | float | str | None
Message: TypeAlias = "Leaf | Sequence[Message] | Mapping[str, Message]"
DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    )
}  # fmt: skip
Skeleton = Any  # names, shapes and dtypes of a message, as plain lists and dicts


def skeleton(message: Message) -> Skeleton:
    """Names, shapes and dtypes of a message without its values, as plain lists and dicts."""
    return mapped(message, _skeleton)


def _skeleton(leaf: Leaf) -> Skeleton:
    if isinstance(leaf, State):
        entries = {name: list(shape) for name, shape in leaf.layout.shape_of.items()}
        row: dict[str, Any] = {"dtype": str(leaf.row.dtype), "entries": entries}
        return row | ({"extras": skeleton(leaf.extras)} if leaf.extras else {})
    if isinstance(leaf, Tensor):
        return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    return type(leaf).__name__


def difference(got: Skeleton, wanted: Skeleton, where: str) -> str:
    """Describes the first difference of two skeletons; empty where they agree. The entries of a state have an order."""
    if isinstance(got, dict) and isinstance(wanted, dict):
        for key in [*wanted, *got]:
            if key not in got or key not in wanted:
                return f"{where} has {'no' if key in wanted else 'an unexpected'} {key}"
            if flaw := difference(got[key], wanted[key], f"{where}.{key}"):
                return flaw
        in_order = not where.endswith(".entries") or [*got] == [*wanted]
        return "" if in_order else f"{where} has its entries in another order"
    return "" if got == wanted else f"{where} is {got}, expected {wanted}"


def infinite(message: Message, where: str) -> str:
    """The path of the first number in a message that is not finite; empty where there is none."""
    return next((location for path, leaf in leaves(message, where) if (location := _infinite(leaf, path))), "")


def _infinite(leaf: Leaf, where: str) -> str:
    if isinstance(leaf, State):
        beside = [value.flatten() for value in leaf.extras.values() if value.is_floating_point()]
        if _is_finite(leaf.row) and (not beside or _is_finite(torch.cat(beside))):  # one look at all is quicker
            return ""
        held = {"": leaf.row, **leaf.extras}
        return next((f"{where}.{name}".rstrip(".") for name, value in held.items() if not _is_finite(value)), "")
    if isinstance(leaf, Tensor | float):
        return "" if _is_finite(torch.as_tensor(leaf)) else where
    return ""


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def size_of(skeleton: Skeleton) -> int:
    """The bytes of the tensors of a message with this skeleton."""
    if isinstance(skeleton, list):
        return sum(map(size_of, skeleton))
    if not isinstance(skeleton, dict):
        return 0
    dtype = skeleton.get("dtype")
    if not (isinstance(dtype, str) and dtype in DTYPES):
        return sum(map(size_of, skeleton.values()))
    shapes = skeleton["entries"].values() if "entries" in skeleton else [skeleton["shape"]]
    own = sum(map(math.prod, shapes)) * DTYPES[dtype].itemsize
    return int(own) + size_of(skeleton.get("extras"))


def leaves(message: Message, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every part of a message that is no dictionary or list, by its path: the keys that lead to it, with dots."""
    if not isinstance(message, dict | list | tuple):
        yield path, message
        return
    for key, value in message.items() if isinstance(message, dict) else enumerate(message):
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def mapped(message: Message, change: Callable[[Any], Any]) -> Any:
    """The same tree with every leaf changed; tuples become lists."""
    if isinstance(message, dict):
        return {key: mapped(value, change) for key, value in message.items()}
    if isinstance(message, list | tuple):
        return [mapped(value, change) for value in message]
    return change(message)


def at(message: Any, path: str) -> Any:
    """The part of a message at a path; None where it has none."""
    for key in path.split(".") if path else ():
        message = message[int(key)] if isinstance(message, list | tuple) else (message or {}).get(key)
    return message
