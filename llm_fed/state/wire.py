"""The wire format: a message is one safetensors byte string whose header carries its structure as JSON. No pickle.

A message is a tree of None, bool, int, float, str, lists, dicts with string keys, tensors and `State`s. Everything that
crosses between server and clients, and everything that a checkpoint holds, passes through `pack` and `unpack`, so
nothing is shared by reference and `len(pack(message))` is the exact number of bytes that travels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, float32

from llm_fed.basics.errors import one_line
from llm_fed.state import Layout, State
from llm_fed.state.lowrank import LowRank
from llm_fed.state.outline import Skeleton, difference, leaves, outline

Message = Any  # a tree as described above

# Decoded bytes by bytes that came, where nobody says what is expected: as much as rank-1 factors of a matrix with 1,024
# rows and more columns make of themselves.
EXPANSION = 1024
_HEADER = "llm_fed"
_shared_layout = lru_cache(maxsize=64)(Layout)  # thousands of clients' states have the same one
_STEPS = 127  # of int8 to either side of zero


class WireError(ValueError):
    """Bytes that are no message of this format: cut short, damaged, or made by something else."""


def pack(message: Any, encoding: str | None = None) -> bytes:
    """The bytes of a message.

    Args:
        encoding: float16 | bfloat16 | int8, in which the float32 row of every `State` is written; `unpack` makes it
            float32 again by itself. Nothing else is: other tensors, extras (BatchNorm statistics), rows of another
            dtype, and the whole of a `LowRank` stay as they are. None: nothing is.

    Raises:
        TypeError: it holds something that cannot travel (an object, a function, a non-string key).
    """
    tensors: dict[str, Tensor] = {}
    tree = _flatten(message, tensors, encoding)
    header = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    return save(_apart(tensors), metadata={_HEADER: header})


def unpack(data: bytes, expected: Skeleton | None = None) -> Any:
    """The message that `pack` made these bytes from, in fresh memory.

    Args:
        expected: the `skeleton` that it must have; nothing is decoded if it has another. None: any, of which at most
            EXPANSION times as many bytes are decoded as came.

    Raises:
        WireError: the bytes are damaged, are no message, or are another one than expected; in one line.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])["__metadata__"][_HEADER]
        tree, tensors = json.loads(header), load(data)
        came, size = outline(tree, tensors)
        flaw = "" if expected is None else difference(came, expected, "upload")
        if expected is None and size > EXPANSION * len(data):
            raise ValueError(f"it would take {size:,} bytes, over {EXPANSION:,} times what came")
        if not flaw:
            return _restore(tree, tensors)
    except Exception as error:  # of any kind: another party may have made these bytes
        raise WireError(f"not a message of llm_fed ({len(data):,} bytes): {one_line(_said(error))}") from error
    raise WireError(one_line(flaw))


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError | SafetensorError) else f"{type(error).__name__}: {error}"


def entries(message: Message) -> int:
    """The number of parameters in a message: those of its states; other tensors (logits, statistics) are none."""
    return sum(leaf.layout.size for _, leaf in leaves(message) if isinstance(leaf, State))


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same contiguous tensors, with a copy of each that shares memory with another one. safetensors takes no such
    tensors, and a message may hold a model twice: two clusters have one until somebody of theirs answers."""
    apart, end = dict(tensors), 0
    for start, key in sorted((tensor.data_ptr(), key) for key, tensor in tensors.items()):
        if start < end:
            apart[key] = tensors[key].clone()
        end = max(end, start + tensors[key].nbytes)
    return apart


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
        if encoding is None or node.row.dtype != float32:
            tree["row"] = _flatten(node.row, tensors)
        else:
            row, scales = encode(node.layout, node.row.detach().cpu(), encoding)
            tree |= {"row": _flatten(row, tensors), "scales": _flatten(scales, tensors), "dtype": "float32"}
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


def _restore(node: Any, tensors: dict[str, Tensor]) -> Any:
    """The message of a tree that `outline` has checked."""
    if isinstance(node, list):
        return [_restore(item, tensors) for item in node]
    if not isinstance(node, dict):
        return node
    if "t" in node:
        return tensors[node["t"]]
    if "s" in node:
        layout = _layout(*node["s"])
        row = tensors[node["row"]["t"]]
        if "dtype" in node:  # float32, the only one that is encoded
            row = decode(layout, row, _restore(node["scales"], tensors))
        return State(layout, row, {name: _restore(value, tensors) for name, value in node["extras"]})
    if "l" in node:
        layout = _layout(*node["l"])
        factors = {name: tuple(_restore(pair, tensors)) for name, pair in node["factors"]}
        return LowRank(layout, factors, _restore(node["rest"], tensors))
    return {key: _restore(value, tensors) for key, value in node["d"]}


def _layout(names: list[str], shapes: list[list[int]]) -> Layout:
    return _shared_layout(tuple(names), tuple(tuple(shape) for shape in shapes))


def encode(layout: Layout, row: Tensor, encoding: str) -> tuple[Tensor, Tensor | None]:
    """The row (P,) of a float32 state as float16, bfloat16 or int8, and the scales (R,) of int8.

    int8: a number is its scale times an integer of -127 to 127, rounded to nearest, so it is off by at most half a
    scale. Each row of an entry has a scale of its own, its largest magnitude / 127; of entries of more than two
    dimensions (convolutions) the rows are the outputs, a vector is one row. A row with a NaN or an infinite value
    becomes all NaN.
    float16: numbers beyond 65,504 become infinite.
    What was decoded is encoded to the same numbers again (int8: above 1e-36, where float32 has all its digits).
    """
    if encoding != "int8" or not len(row):
        return row.to(getattr(torch, encoding)), None
    lengths = _lengths(layout)
    scales = torch.segment_reduce(row.abs(), "max", lengths=lengths, initial=0) / _STEPS
    codes = (row / scales.repeat_interleave(lengths)).round().clamp(-_STEPS, _STEPS)
    return codes.nan_to_num(0).to(torch.int8), scales  # NaN: of a row of zeros, or under a scale that is not finite


def decode(layout: Layout, row: Tensor, scales: Tensor | None) -> Tensor:
    """The float32 row (P,) that `encode` was given, up to its rounding.

    Raises:
        ValueError: rows or scales of another number than the layout's.
    """
    if scales is None:
        return row.float()
    rows, shapes = sum(_rows(shape) for shape in layout.shapes), layout.shapes
    if min((dim for shape in shapes for dim in shape), default=0) < 0 or (rows, layout.size) != (len(scales), len(row)):
        raise ValueError(f"{len(row)} numbers with {len(scales)} scales for {layout.size} in {rows} rows")
    return row.float() * scales.float().repeat_interleave(_lengths(layout))


def _lengths(layout: Layout) -> Tensor:
    """(R,): how many numbers each row of each entry holds."""
    rows = torch.tensor([_rows(shape) for shape in layout.shapes], dtype=torch.long)
    sizes = torch.tensor([math.prod(shape) for shape in layout.shapes], dtype=torch.long)
    return (sizes // rows.clamp(min=1)).repeat_interleave(rows)


def _rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1
