"""Weighted means of states: what federated averaging does with what its clients send."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llm_fed.state import State, combine


def mean(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """`sum_k w_k states[k] / sum_k w_k`; without weights the plain mean.

    Raises:
        ValueError: no states, another number of weights, or weights that do not sum to a positive number.
    """
    weights = [1.0] * len(states) if weights is None else list(weights)
    if len(weights) != len(states) or sum(weights) <= 0:
        raise ValueError(f"{len(weights)} weights that sum to {sum(weights)} for {len(states)} states")
    share = torch.tensor(weights, dtype=torch.float64)
    return combine(states, share / share.sum())
