"""Merging any number of adapters, without roles and without data: one rule over what each adds to a layer.

A rule is given K states with weights, and returns one, and how much of what it wanted was cut off to have a low rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.merge.factors import decomposed, stacked
from llm_fed.merge.products import combined, factored, layers
from llm_fed.mergers.dare import dropped
from llm_fed.mergers.karcher import karcher
from llm_fed.mergers.slerp import arc
from llm_fed.mergers.ties import elected
from llm_fed.state import State

Merged = tuple[State, float]
Weights = Sequence[float]


def linear(states: Sequence[State], weights: Weights) -> Merged:
    """The weighted sum of the products B A, exactly."""
    return combined(states, lambda products: weights), 0.0


def svd(states: Sequence[State], weights: Weights, *, rank: int | None = None) -> Merged:
    """The same, cut to a rank (default: the largest of the parents) where its singular values are smallest."""
    most = rank or max(len(state[a]) for state in states for _, a, _ in layers(state))
    entries, lost, whole = linear(states, weights)[0].tensors(), 0.0, 0.0
    for layer, (b, a) in stacked(states, weights).items():
        u, s, v = decomposed(b, a, 1)
        root = s[:most].sqrt()
        entries |= {f"{layer}.lora_A": (root[:, None] * v[:most]).to(a), f"{layer}.lora_B": (u[:, :most] * root).to(b)}
        lost, whole = lost + float(s[most:].square().sum()), whole + float(s.square().sum())
    return State.of(entries), (lost / whole) ** 0.5 if whole else 0.0


def ties(states: Sequence[State], weights: Weights, *, density: float = 0.2, rank: int | None = None) -> Merged:
    """See `mergers.ties`; of the weighted products."""
    return factored(states, lambda layer, products: elected(_weighed(products, weights), density), rank)


def dare(states: Sequence[State], weights: Weights, *, drop: float = 0.5, rank: int | None = None) -> Merged:
    """See `mergers.dare`; of the weighted products. The same entries are dropped each time."""
    return factored(states, lambda layer, products: dropped(_weighed(products, weights), drop, 0, layer), rank)


def slerp(states: Sequence[State], weights: Weights) -> Merged:
    """See `mergers.slerp`."""
    if len(states) != 2:
        raise UserError(
            f"slerp goes from one adapter to another, and {len(states)} are given; --method karcher takes any number"
        )
    return combined(states, lambda products: arc(products, weights[0] / sum(weights))), 0.0


def mean_direction(states: Sequence[State], weights: Weights) -> Merged:
    """See `mergers.karcher`."""
    return combined(states, lambda products: karcher(products, weights)), 0.0


RULES: Mapping[str, Callable[..., Merged]] = {
    "linear": linear, "svd": svd, "ties": ties, "dare": dare, "karcher": mean_direction, "slerp": slerp,
}  # fmt: skip


def weights_of(method: str, given: Weights | None, count: int) -> Weights:
    """A weight for each of `count` adapters: by default 1 over their number, or for ties, which takes a mean itself, 1.

    Raises:
        UserError: another number of weights, or weights that a method has no use for.
    """
    if given is None:
        return [1.0 if method == "ties" else 1 / count] * count
    if len(given) != count:
        raise UserError(f"--weights has {len(given)} numbers for {count} adapters; give one for each")
    if method in ("karcher", "slerp") and not (min(given) >= 0 and sum(given) > 0):
        raise UserError(f"--weights of {method} are shares of a way: none is below 0, and one is above it")
    return given


def _weighed(products: Tensor, weights: Weights) -> Tensor:
    return products * products.new_tensor(weights)[:, None, None]
