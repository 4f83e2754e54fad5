"""Merging adapters as differences of weights: what each adds to a layer is its product B A (out, in).

All have one scaling; their ranks may differ, from layer to layer too. A result is exact at the sum of the ranks, or the
nearest of a given one. A head is the mean of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from llm_fed.state import FACTORS, HEAD, State, factor_of

Pair = tuple[Tensor, Tensor]  # B (out, R), A (R, in)
Coefficients = Callable[[Tensor], Sequence[float]]
Rule = Callable[[str, Tensor], Tensor]


def weighed(products: Tensor, weights: Sequence[float]) -> Tensor:
    """K products (K, out, in), each multiplied by its weight."""
    return products * products.new_tensor(weights)[:, None, None]


def layers(state: State) -> Iterator[tuple[str, str, str]]:
    """(layer, name of its A, name of its B)."""
    for name in state:
        if factor_of(name) == FACTORS[0]:
            layer = name.rpartition(".")[0]
            yield layer, name, f"{layer}.{FACTORS[1]}"


def combined(states: Sequence[State], coefficients: Coefficients) -> State:
    """Per layer `sum_k c_k B_k A_k` of K states, exactly: the A's are stacked, and the B's, each times its coefficient,
    stand side by side. `coefficients`: of the inner products (K, K) of a layer's K products, in float64."""
    entries = _heads(states)
    for _, a, b in layers(states[0]):
        chosen = coefficients(inner([(state[b], state[a]) for state in states]))
        entries[a] = torch.cat([state[a] for state in states])
        entries[b] = torch.cat([c * state[b] for c, state in zip(chosen, states, strict=True)], 1)
    return State.of({name: entries[name] for name in states[0]})


def factored(states: Sequence[State], rule: Rule, rank: int | None = None) -> tuple[State, float]:
    """Per layer the nearest product of a rank to what `rule` makes of the K products, and how much of all layers
    together is lost by it: the norm of the difference, relative to that of the whole. `rule`: of a layer's name and its
    products (K, out, in), what the merged adapter should add (out, in). `rank`: of each layer (default: the parents'
    sum)."""
    entries, lost, whole = _heads(states), 0.0, 0.0
    for layer, a, b in layers(states[0]):
        wanted = rule(layer, torch.stack([state[b].double() @ state[a].double() for state in states]))
        left, values, right = torch.linalg.svd(wanted, full_matrices=False)
        most = rank or sum(len(state[a]) for state in states)
        lost += float(values[most:].square().sum())
        whole += float(values.square().sum())
        count = min(most, len(values))
        root = values[:count].sqrt()
        # Of a narrower layer the rest is zero.
        entries[a] = pad(root[:, None] * right[:count], (0, 0, 0, most - count)).to(states[0].row)
        entries[b] = pad(left[:, :count] * root, (0, most - count)).to(states[0].row)
    return State.of({name: entries[name] for name in states[0]}), (lost / whole) ** 0.5 if whole else 0.0


def inner(pairs: Sequence[Pair]) -> Tensor:
    """The inner products (K, K) of K products B A of one shape, in float64, without forming any of them."""
    wide = [(b.double(), a.double()) for b, a in pairs]
    return torch.stack([torch.stack([((b.T @ d) * (a @ c.T)).sum() for d, c in wide]) for b, a in wide])


def _heads(states: Sequence[State]) -> dict[str, Tensor]:
    names = [name for name in states[0] if factor_of(name) == HEAD]
    return {name: torch.stack([state[name] for state in states]).mean(0) for name in names}
