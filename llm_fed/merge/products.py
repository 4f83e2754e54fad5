"""Merging two adapters as differences of weights: what each adds to a layer is its product B A (out, in).

Both have one structure of rank r; a result has twice the rank with the same scaling, as `mix_products` has. A head is
the mean of the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llm_fed.state import State
from llm_fed.state.entries import FACTORS, HEAD, factor_of

Coefficients = Callable[[Tensor, Tensor], tuple[float, float]]
Rule = Callable[[str, Tensor], Tensor]


def layers(state: State) -> Iterator[tuple[str, str, str]]:
    """(layer, name of its A, name of its B)."""
    for name in state:
        if factor_of(name) == FACTORS[0]:
            layer = name.rpartition(".")[0]
            yield layer, name, f"{layer}.{FACTORS[1]}"


def combined(first: State, second: State, coefficients: Coefficients) -> State:
    """Per layer `c1 * B1 A1 + c2 * B2 A2`, exactly: the A's are stacked, and the B's, each times its coefficient, stand
    side by side.

    Args:
        coefficients: of the two products (out, in) of a layer.
    """
    entries = _heads(first, second)
    for _, a, b in layers(first):
        ones, others = (state[b].double() @ state[a].double() for state in (first, second))
        c1, c2 = coefficients(ones, others)
        entries[a] = torch.cat([first[a], second[a]])
        entries[b] = torch.cat([c1 * first[b], c2 * second[b]], 1)
    return State.of({name: entries[name] for name in first})


def factored(first: State, second: State, rule: Rule) -> tuple[State, float]:
    """Per layer the best approximation of twice the rank to what `rule` makes of the two products, and how much of all
    layers together is lost by it: the norm of the difference, relative to that of the whole.

    Args:
        rule: of a layer's name and its two products (2, out, in), what the merged adapter should add (out, in).
    """
    entries, lost, whole = _heads(first, second), 0.0, 0.0
    for layer, a, b in layers(first):
        wanted = rule(layer, torch.stack([state[b].double() @ state[a].double() for state in (first, second)]))
        left, values, right = torch.linalg.svd(wanted, full_matrices=False)
        rank = 2 * len(first[a])
        lost += float(values[rank:].square().sum())
        whole += float(values.square().sum())
        kept = torch.zeros(rank, dtype=values.dtype, device=values.device)
        kept[: len(values)] = values[:rank].sqrt()  # of a layer narrower than twice the rank the rest is zero
        count = min(rank, len(values))
        entries[a] = _like(first[a], torch.zeros(rank, wanted.shape[1]))
        entries[b] = _like(first[b], torch.zeros(wanted.shape[0], rank))
        entries[a][:count] = kept[:count, None] * right[:count]
        entries[b][:, :count] = left[:, :count] * kept[:count]
    return State.of({name: entries[name] for name in first}), (lost / whole) ** 0.5 if whole else 0.0


def _heads(first: State, second: State) -> dict[str, Tensor]:
    return {name: (first[name] + second[name]) / 2 for name in first if factor_of(name) == HEAD}


def _like(one: Tensor, values: Tensor) -> Tensor:
    return values.to(one)
