"""Rows of states in fewer bytes: half precision, or 8-bit integers with a scale for each row of each entry."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llm_fed.state import Layout

_STEPS = 127  # of int8 to either side of zero


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
