"""Messages are trees: dictionaries and lists whose leaves are states, tensors, numbers, texts or None. An outline is
what one is made of without its values. It is known before anything is decoded, and compared first.

Bytes come from other parties. Whatever their header says is checked here against the tensors that came with it, so that
decoding allocates what the outline says and no more, and what is decoded is a message that `wire.pack` could have made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from llm_fed.state import State

Skeleton = Any  # names, shapes and dtypes of a message, as plain lists and dicts

_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
_ENCODED = (torch.float16, torch.bfloat16, torch.int8)
_DEEPEST = 200  # levels of a message
_INTEGERS = range(-(2**63), 2**64)
_ROWS = {"row", "extras", "s"}


def skeleton(message: Any) -> Skeleton:
    """Names, shapes and dtypes of a message without its values, as plain lists and dicts."""
    return mapped(message, _skeleton)


def _skeleton(leaf: Any) -> Skeleton:
    if isinstance(leaf, State):
        entries = {name: list(shape) for name, shape in leaf.layout.shape_of.items()}
        row: dict[str, Any] = {"dtype": str(leaf.row.dtype), "entries": entries}
        return row | ({"extras": skeleton(leaf.extras)} if leaf.extras else {})
    if isinstance(leaf, Tensor):
        return {"dtype": str(leaf.dtype), "shape": list(leaf.shape)}
    return type(leaf).__name__


def difference(got: Skeleton, wanted: Skeleton, where: str) -> str:
    """The first place where two skeletons differ; empty where they agree. The entries of a state have an order."""
    if isinstance(got, dict) and isinstance(wanted, dict):
        for key in [*wanted, *got]:
            if key not in got or key not in wanted:
                return f"{where} has {'no' if key in wanted else 'an unexpected'} {key}"
            if flaw := difference(got[key], wanted[key], f"{where}.{key}"):
                return flaw
        in_order = not where.endswith(".entries") or [*got] == [*wanted]
        return "" if in_order else f"{where} has its entries in another order"
    return "" if got == wanted else f"{where} is {got}, expected {wanted}"


def infinite(message: Any, where: str) -> str:
    """The first place in a message with a number that is not finite; empty where there is none."""
    return next((location for path, leaf in leaves(message, where) if (location := _infinite(leaf, path))), "")


def _infinite(leaf: Any, where: str) -> str:
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


def outline(tree: Any, tensors: Mapping[str, Tensor]) -> tuple[Skeleton, int]:
    """The skeleton of the message that a header's tree and the tensors beside it are, and the bytes that it will take.

    Args:
        tree: as `wire.pack` writes it; anything that JSON can hold is checked.
        tensors: by name, as they came.

    Raises:
        ValueError: it is no such tree; what is wrong with it.
    """
    reader = _OutlineReader(tensors)
    skeleton = reader.node(tree, 0)
    if reader.left:
        raise ValueError(f"{len(reader.left)} tensors belong to nothing")
    return skeleton, reader.bytes


class _OutlineReader:
    """Reads one tree. Each tensor belongs to one place, so that no bytes count twice."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.left, self.bytes = dict(tensors), 0

    def node(self, node: Any, depth: int) -> Skeleton:
        _require(depth < _DEEPEST, f"it is nested deeper than {_DEEPEST} levels")
        if isinstance(node, list):
            return [self.node(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return _plain(node)
        if "t" in node:
            tensor = self._tensor(node)
            self.bytes += tensor.nbytes
            return {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        if "s" in node:
            return self._state(node)
        if "l" in node:
            return self._low_rank(node)
        _require(node.keys() == {"d"}, "an unknown kind of node")
        return {key: self.node(value, depth + 1) for key, value in _pairs(node["d"]).items()}

    def _tensor(self, node: Any) -> Tensor:
        _require(isinstance(node, dict) and node.keys() == {"t"}, "a malformed node of a tensor")
        key = node["t"]
        _require(isinstance(key, str) and key in self.left, "a tensor is missing, or belongs to two places")
        tensor = self.left.pop(key)
        _require(tensor.dtype in _DTYPES, f"numbers of {tensor.dtype}")
        return tensor

    def _state(self, node: dict[str, Any]) -> Skeleton:
        encoded = "dtype" in node
        _require(node.keys() == (_ROWS | {"scales", "dtype"} if encoded else _ROWS), "a malformed node of a state")
        shapes, row = _layout(node["s"]), self._tensor(node["row"])
        size = sum(map(math.prod, shapes.values()))
        _require(row.dim() == 1 and len(row) == size, f"a row of {list(row.shape)} for {size} parameters")
        dtype = row.dtype
        if encoded:
            _require(node["dtype"] == "float32" and dtype in _ENCODED, f"a row of {dtype} as another dtype")
            dtype = torch.float32
            if node["scales"] is not None:
                scales = self._tensor(node["scales"])
                rows = sum(shape[0] if len(shape) > 1 else 1 for shape in shapes.values())
                _require(row.dtype == torch.int8, f"scales for a row of {row.dtype}")
                _require(scales.dtype == torch.float32, f"scales of {scales.dtype}")
                _require(list(scales.shape) == [rows], f"scales of {list(scales.shape)} for {rows} rows")
            else:
                _require(row.dtype != torch.int8 or not size, "a row of torch.int8 without scales")
        _require(dtype.is_floating_point, f"a row of {dtype}")
        self.bytes += size * dtype.itemsize
        skeleton: dict[str, Any] = {"dtype": str(dtype), "entries": shapes}
        extras = _pairs(node["extras"])
        for name, value in extras.items():
            tensor = self._tensor(value)
            self.bytes += tensor.nbytes
            extras[name] = {"dtype": str(tensor.dtype), "shape": list(tensor.shape)}
        return skeleton | ({"extras": extras} if extras else {})

    def _low_rank(self, node: dict[str, Any]) -> Skeleton:
        _require(node.keys() == {"l", "factors", "rest"}, "a malformed node of a low-rank state")
        shapes, factors = _layout(node["l"]), _pairs(node["factors"])
        _require(isinstance(node["rest"], dict) and "s" in node["rest"], "a low-rank state without its rest")
        rest = self._state(node["rest"])
        whole = [name for name in shapes if name not in factors]
        _require([*rest["entries"]] == whole, f"{len(factors)} products and {len(whole)} entries that are others")
        dtypes = {rest["dtype"]} if whole else set()
        for name, pair in factors.items():
            _require(name in shapes and isinstance(pair, list) and len(pair) == 2, f"no two factors for {name}")
            left, right = map(self._tensor, pair)
            shape, fits = shapes[name], left.dim() == right.dim() == 2 and left.shape[1] == right.shape[0]
            fits = fits and len(shape) > 1 and left.shape[0] == shape[0] and right.shape[1] == math.prod(shape[1:])
            fits = fits and 1 <= left.shape[1] <= min(left.shape[0], right.shape[1])
            _require(fits, f"factors of {list(left.shape)} and {list(right.shape)} for {name} of {shape}")
            dtypes |= {str(left.dtype), str(right.dtype)}
            _require(left.dtype.is_floating_point, f"factors of {left.dtype}")
            self.bytes += 2 * math.prod(shape) * left.dtype.itemsize  # as a product, and in the row
        _require(rest["entries"] == {name: shapes[name] for name in whole}, "entries of other shapes than they should")
        _require(len(dtypes) <= 1, f"entries of {' and '.join(sorted(dtypes))}")
        return rest | {"dtype": min(dtypes, default=rest["dtype"]), "entries": shapes}


def _layout(node: Any) -> dict[str, list[int]]:
    """The shapes by name of a state's entries, in their order."""
    good = isinstance(node, list) and len(node) == 2 and all(isinstance(part, list) for part in node)
    _require(good and len(node[0]) == len(node[1]), "a malformed layout")
    names, shapes = node
    for shape in shapes:
        good = isinstance(shape, list) and all(type(dim) is int and dim >= 0 for dim in shape)
        _require(good, "a malformed shape")
        _require(math.prod(dim for dim in shape if dim) < 2**63, "a shape that is too large")
    return _pairs([[name, shape] for name, shape in zip(names, shapes, strict=True)])


def _pairs(node: Any) -> dict[str, Any]:
    """Pairs of a name and a value, where no name comes twice."""
    good = isinstance(node, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in node)
    _require(good, "malformed pairs")
    values = {}
    for name, value in node:
        _require(isinstance(name, str), "a name that is not a text")
        _require(name not in values, f"{name} twice")
        _plain(name)
        values[name] = value
    return values


def _plain(node: Any) -> str:
    """The type of None, a bool, number or text."""
    if isinstance(node, str):
        node.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
    elif type(node) is int:
        _require(node in _INTEGERS, "a whole number of more than 64 bits")
    return type(node).__name__


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)


def leaves(message: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every part of a message that is no dictionary or list, with its place: the keys that lead to it, with dots."""
    if not isinstance(message, dict | list | tuple):
        yield path, message
        return
    for key, value in message.items() if isinstance(message, dict) else enumerate(message):
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def mapped(message: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with every leaf changed; tuples become lists."""
    if isinstance(message, dict):
        return {key: mapped(value, change) for key, value in message.items()}
    if isinstance(message, list | tuple):
        return [mapped(value, change) for value in message]
    return change(message)


def at(message: Any, path: str) -> Any:
    """The part of a message at a place that it has."""
    for key in path.split(".") if path else ():
        message = message[int(key)] if isinstance(message, list | tuple) else message[key]
    return message
