"""Inputs of a layer that all rows of a batch share, such as a table of positions."""

from __future__ import annotations

from torch import Tensor

_MARK = "all_rows_share_it"


def for_all_rows(inputs: Tensor) -> Tensor:
    """Inputs (1, T, in), marked: a layer in which each row has an adapter of its own gives (N, T, out) for them."""
    setattr(inputs, _MARK, True)
    return inputs


def is_for_all_rows(inputs: Tensor) -> bool:
    return getattr(inputs, _MARK, False)
