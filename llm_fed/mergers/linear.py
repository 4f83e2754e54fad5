"""Model soups (Wortsman et al., ICML 2022) of any number of adapters, by the products of their factors: the weighted
sum, exactly or cut to a rank."""

from __future__ import annotations

from collections.abc import Sequence

from llm_fed.merge.factors import decomposed, stacked
from llm_fed.merge.products import combined, layers
from llm_fed.state import State


def linear(states: Sequence[State], weights: Sequence[float]) -> tuple[State, float]:
    """The weighted sum of the products B A, exactly, at the sum of the ranks; nothing is lost."""
    return combined(states, lambda products: weights), 0.0


def svd(states: Sequence[State], weights: Sequence[float], *, rank: int | None = None) -> tuple[State, float]:
    """The weighted sum of the products, cut to a rank (default: the largest of the parents) where its singular values
    are smallest; and how much is lost by it, relative to the norm of the whole."""
    most = rank or max(len(state[a]) for state in states for _, a, _ in layers(state))
    entries, lost, whole = linear(states, weights)[0].tensors(), 0.0, 0.0
    for layer, (b, a) in stacked(states, weights).items():
        u, s, v = decomposed(b, a, 1)
        root = s[:most].sqrt()
        entries |= {f"{layer}.lora_A": (root[:, None] * v[:most]).to(a), f"{layer}.lora_B": (u[:, :most] * root).to(b)}
        lost, whole = lost + float(s[most:].square().sum()), whole + float(s.square().sum())
    return State.of(entries), (lost / whole) ** 0.5 if whole else 0.0
