"""Anchors as one matrix, brought to one length (Feddle, Eq. 4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_fed.state import State, stack


def normalized(anchors: Sequence[State], on: bool = True) -> tuple[Tensor, Tensor]:
    """(atlas, scales): the anchors times their scales (M, P), and the scales (M,) that bring each to the median norm.

    An anchor of norm 0 has no direction: its scale is 0, and it is not in the median. `on`: whether to normalise;
    otherwise the other scales are 1."""
    norms = torch.tensor([anchor.norm() for anchor in anchors], dtype=anchors[0].row.dtype)
    moving = norms > 0
    scales = moving.to(norms)
    if on and moving.any():
        scales = torch.where(moving, norms[moving].quantile(0.5) / norms, scales)
    return scales[:, None] * stack(anchors), scales
