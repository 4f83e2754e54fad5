"""The wire format: a message is one safetensors byte string whose header carries its structure as JSON. No pickle.

A message is a tree of None, bool, int, float, str, lists, dicts with string keys, tensors and `State`s. Everything that
crosses between server and clients, and everything that a checkpoint holds, passes through `pack` and `unpack`, so
nothing is shared by reference and `len(pack(message))` is the exact number of bytes that travels.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, float32

from llm_fed.basics.errors import one_line
from llm_fed.state import Layout, State
from llm_fed.state.lowrank import LowRank
from llm_fed.state.outline import DTYPES, Skeleton, difference, leaves, size_of, skeleton

Message = Any  # a tree as described above

# Decoded bytes by bytes that came, where nobody says what is expected: as much as rank-1 factors of a matrix with 1,024
# rows and more columns make of themselves.
EXPANSION = 1024
_HEADER = "llm_fed"
_shared_layout = lru_cache(maxsize=64)(Layout)  # thousands of clients' states have the same one
_DEEPEST = 200  # levels of a message
_INTEGERS = range(-(2**63), 2**64)


class WireError(ValueError):
    """Bytes that are no message of this format: cut short, damaged, or made by something else."""


def pack(message: Any, encoding: str | None = None) -> bytes:
    """The bytes of a message. TypeError: it holds something that cannot travel (an object, a function, a non-string
    key).

    Args:
        encoding: float16 | bfloat16, in which the float32 row of every `State` is written; `unpack` makes it float32
            again by itself. Nothing else is: other tensors, extras (BatchNorm statistics), rows of another dtype, and
            the whole of a `LowRank` stay as they are. None: nothing is.
    """
    tensors: dict[str, Tensor] = {}
    tree = _flatten(message, tensors, encoding)
    header = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    # safetensors takes no tensors that share memory, and a message may hold a model twice: two clusters have one until
    # somebody of theirs answers.
    end = 0
    for start, key in sorted((tensor.data_ptr(), key) for key, tensor in tensors.items()):
        stop = start + tensors[key].nbytes
        if start < end:
            tensors[key] = tensors[key].clone()
        end = max(end, stop)
    return save(tensors, metadata={_HEADER: header})


def unpack(data: bytes, expected: Skeleton | None = None) -> Any:
    """The message that `pack` made these bytes from, in fresh memory. `expected`: the `skeleton` that it must have, and
    little more than that is decoded. None: any, of which at most EXPANSION times as many bytes are decoded as came.
    WireError: the bytes are damaged, are no message, or are another one than expected; in one line."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])["__metadata__"][_HEADER]
        tree, tensors = json.loads(header), load(data)
        # Only factors become more than five times what came: their product, and its copy in the row.
        room = EXPANSION * len(data) if expected is None else 5 * len(data) + 2 * size_of(expected)
        reader = _MessageReader(tensors, room)
        message = reader.node(tree, 0)
        _require(not reader.left, f"{len(reader.left)} tensors belong to nothing")
    except Exception as error:  # of any kind: another party may have made these bytes
        said = str(error) if isinstance(error, ValueError | SafetensorError) else f"{type(error).__name__}: {error}"
        raise WireError(f"not a message of llm_fed ({len(data):,} bytes): {one_line(said)}") from error
    if flaw := "" if expected is None else difference(skeleton(message), expected, "upload"):
        raise WireError(one_line(flaw))
    return message


def entries(message: Message) -> int:
    """The number of parameters in a message: those of its states; other tensors (logits, statistics) are none."""
    return sum(leaf.layout.size for _, leaf in leaves(message) if isinstance(leaf, State))


def _flatten(node: Any, tensors: dict[str, Tensor], encoding: str | None = None) -> Any:
    if node is None or isinstance(node, bool | int | float | str):
        return node
    if isinstance(node, Tensor):
        key = str(len(tensors))
        tensors[key] = node.detach().cpu().contiguous()
        return {"t": key}
    if isinstance(node, LowRank):
        return {
            "l": [list(node.layout.names), [list(shape) for shape in node.layout.shapes]],
            "factors": [[name, _flatten(pair, tensors)] for name, pair in node.factors.items()],
            "rest": _flatten(node.rest, tensors),
        }
    if isinstance(node, State):
        tree: dict[str, Any] = {"s": [list(node.layout.names), [list(shape) for shape in node.layout.shapes]]}
        encoded = encoding is not None and node.row.dtype == float32
        tree["row"] = _flatten(node.row.to(DTYPES[f"torch.{encoding}"]) if encoded else node.row, tensors)
        tree |= {"dtype": "float32"} if encoded else {}
        return tree | {"extras": [[name, _flatten(value, tensors)] for name, value in node.extras.items()]}
    if isinstance(node, list | tuple):
        return [_flatten(item, tensors, encoding) for item in node]
    if isinstance(node, dict):
        if not all(isinstance(key, str) for key in node):
            raise TypeError(f"only string keys can travel, got {sorted(map(repr, node))[:3]}")
        return {"d": [[key, _flatten(value, tensors, encoding)] for key, value in node.items()]}
    raise TypeError(
        f"{type(node).__name__} cannot travel: a message is made of numbers, strings, lists, dicts, tensors, states"
    )


@dataclass
class _MessageReader:
    """Makes a message of its tree, which another party may have written: a message that `pack` could have made. Each
    tensor belongs to one place, so that no bytes count twice. `left`: tensors that belong to nothing yet; `room`: bytes
    that the message may take. ValueError: it is no such tree, or takes more; what is wrong with it."""

    left: dict[str, Tensor]
    room: int

    def node(self, node: Any, depth: int) -> Any:
        _require(depth < _DEEPEST, f"it is nested deeper than {_DEEPEST} levels")
        match node:
            case list():
                return [self.node(item, depth + 1) for item in node]
            case {"t": _}:
                return self._tensor(node)
            case {"s": layout, "row": row, "extras": extras, **more} if more.keys() <= {"dtype"}:
                return self._state(_layout(layout), self._tensor(row), more.get("dtype"), extras)
            case {"l": layout, "factors": factors, "rest": {"s": _} as rest, **more} if not more:
                return self._low_rank(_layout(layout), factors, self.node(rest, depth + 1))
            case {"d": pairs, **more} if not more:
                return {key: self.node(value, depth + 1) for key, value in _pairs(pairs).items()}
            case dict():
                raise ValueError("an unknown kind of node")
            case int():
                _require(node in _INTEGERS, "a whole number of more than 64 bits")
            case str():
                node.encode()  # a lone surrogate is a UnicodeEncodeError, which is a ValueError
        return node

    def _take(self, size: int) -> None:
        self.room -= size
        _require(self.room >= 0, f"it would take more bytes than were expected, or {EXPANSION:,} times what came")

    def _tensor(self, node: Any) -> Tensor:
        _require(isinstance(node, dict) and node.keys() == {"t"}, "a malformed node of a tensor")
        key = node["t"]
        _require(isinstance(key, str) and key in self.left, "a tensor is missing, or belongs to two places")
        tensor = self.left.pop(key)
        _require(tensor.dtype in DTYPES.values(), f"numbers of {tensor.dtype}")
        self._take(tensor.nbytes)
        return tensor

    def _state(self, layout: Layout, row: Tensor, dtype: Any, extras: Any) -> State:
        _require(row.shape == (layout.size,), f"a row of {list(row.shape)} for {layout.size} parameters")
        if dtype is not None:
            good = dtype == "float32" and row.dtype in (torch.float16, torch.bfloat16)
            _require(good, f"a row of {row.dtype} as another dtype")
            self._take(layout.size * float32.itemsize)
            row = row.float()
        _require(row.is_floating_point(), f"a row of {row.dtype}")
        return State(layout, row, {name: self._tensor(value) for name, value in _pairs(extras).items()})

    def _low_rank(self, layout: Layout, pairs: Any, rest: State) -> LowRank:
        factors = {}
        for name, pair in _pairs(pairs).items():
            left, right = map(self._tensor, pair)
            factors[name] = left, right
            rows, columns = layout.shape_of[name][0], math.prod(layout.shape_of[name][1:])
            rank = left.shape[1]
            fits = left.shape == (rows, rank) and right.shape == (rank, columns) and 1 <= rank <= min(rows, columns)
            _require(fits, f"factors of {list(left.shape)} and {list(right.shape)} for {name} of {rows} x {columns}")
            _require(left.is_floating_point(), f"factors of {left.dtype}")
            self._take(2 * rows * columns * left.dtype.itemsize)  # as a product, and in the row
        same = all(shape == layout.shape_of[name] for name, shape in rest.layout.shape_of.items())
        _require(same, "entries of other shapes than they should")
        return LowRank(layout, factors, rest)


def _layout(node: Any) -> Layout:
    """The entries of a state in their order."""
    names, shapes = node
    for shape in shapes:
        good = all(type(dim) is int and dim >= 0 for dim in shape)
        _require(good and math.prod(dim for dim in shape if dim) < 2**63, "a malformed shape, or one too large")
    _require(len(names) == len(shapes), "a malformed layout")
    return _shared_layout(tuple(_pairs([[name, None] for name in names])), tuple(map(tuple, shapes)))


def _pairs(node: Any) -> dict[str, Any]:
    """Pairs of a name and a value, where no name comes twice."""
    values = {}
    for name, value in node:
        _require(isinstance(name, str), "a name that is not a text")
        _require(name not in values, f"{name} twice")
        name.encode()  # see `node`
        values[name] = value
    return values


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
