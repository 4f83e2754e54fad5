"""Weighted means of states: what federated averaging does with what its clients send, and mixtures of two adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from llm_fed.merge.products import combined
from llm_fed.state import HEAD, State, combine, factor_of

# lambda_fed: 0 is the local model, 1 the federated one (POTARA, App. E).
WEIGHTS = tuple(step / 10 for step in range(11))


def mean(states: Sequence[State], weights: Sequence[float] | None = None) -> State:
    """`sum_k w_k states[k] / sum_k w_k`; without weights the plain mean. ValueError: no states, another number of
    weights, or weights that do not sum to a positive number."""
    weights = [1.0] * len(states) if weights is None else list(weights)
    if len(weights) != len(states) or sum(weights) <= 0:
        raise ValueError(f"{len(weights)} weights that sum to {sum(weights)} for {len(states)} states")
    share = torch.tensor(weights, dtype=torch.float64)
    return combine(states, share / share.sum())


def mix_factors(first: State, second: State, weight: float | Mapping[str, float]) -> State:
    """`weight * first + (1 - weight) * second`, for A and for B (POTARA, App. B). `weight`: one for all entries, or one
    for each of A and B and, where there are such entries, HEAD."""
    of = {name: weight[factor_of(name)] if isinstance(weight, Mapping) else weight for name in first}
    return State.of({name: of[name] * first[name] + (1 - of[name]) * second[name] for name in first})


def mix_products(first: State, second: State, weight: float) -> State:
    """The adapter of twice the rank whose product B A is `weight * B1 A1 + (1 - weight) * B2 A2` (POTARA, Eq. 3). With
    twice the alpha the scaling stays. A head is the weighted mean of the two."""
    merged = combined([first, second], lambda products: (weight, 1 - weight))
    head = [name for name in first if factor_of(name) == HEAD]
    return merged.updated(mix_factors(first.pick(head), second.pick(head), weight)) if head else merged


def best(scores: Mapping[float, float]) -> float:
    """The weight with the highest score; of several the one nearest to 1/2, then the larger one."""
    highest = max(scores.values())
    return min((weight for weight, score in scores.items() if score == highest), key=lambda w: (abs(w - 0.5), -w))
