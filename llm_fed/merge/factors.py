"""Adapters of unequal rank: what they add to a layer is `s B A` with B (out, r) and A (r, in), s = alpha / r.

alpha is the same for all, so s differs with the rank, and it is the products with s that are averaged or kept. Whoever
holds an adapter holds it in their own scaling: where it changes hands, B is multiplied by the ratio of the two scalings
(`factor`), and A stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from llm_fed.merge.mean import mean
from llm_fed.merge.products import Pair, layers
from llm_fed.state import FACTORS, HEAD, State, factor_of


def rank_of(state: State) -> int:
    """The rank of an adapter's state."""
    _, a, _ = next(layers(state))
    return len(state[a])


def resized(state: State, rank: int, factor: float = 1.0) -> State:
    """The adapter with its first `rank` components, or with components of zeros after its own; B times `factor`."""
    entries = state.tensors()
    for _, a, b in layers(state):
        more = rank - len(state[a])  # fewer, below 0
        entries[a], entries[b] = pad(state[a], (0, 0, 0, more)), pad(factor * state[b], (0, more))
    return State.of(entries)


def stacked(states: Sequence[State], weights: Sequence[float]) -> dict[str, Pair]:
    """By layer one pair of factors whose product is `sum_k weights[k] B_k A_k`, exactly: the A's stand one above the
    other, and the B's, each times its weight, side by side."""
    pairs = {}
    for layer, a, b in layers(states[0]):
        wide = torch.cat([weight * state[b] for weight, state in zip(weights, states, strict=True)], dim=1)
        pairs[layer] = wide, torch.cat([state[a] for state in states])
    return pairs


def decomposed(b: Tensor, a: Tensor, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """The singular value decomposition U (out, n), S (n,), V (n, in) of B A, in float64, with n at least `least` where
    the layer is as wide; B A is formed only where its factors have fewer components than that. Singular vectors are
    known up to their sign; here the largest number of each row of V is positive."""
    b, a = b.double(), a.double()
    if len(a) < min(least, len(b), a.shape[1]):  # the others are vectors whose singular value is zero
        u, s, v = torch.linalg.svd(b @ a, full_matrices=False)
    else:
        (left, upper), (right, lower) = torch.linalg.qr(b), torch.linalg.qr(a.T)
        u, s, v = torch.linalg.svd(upper @ lower.T, full_matrices=False)
        u, v = left @ u, v @ right.T
    sign = torch.where(v.gather(1, v.abs().argmax(1, keepdim=True)) < 0, -1.0, 1.0).to(v)
    return u * sign.T, s, v * sign


def product_norms(state: State) -> dict[str, float]:
    """By layer ||B A||, the Frobenius norm."""
    norms = {}
    for layer, a, b in layers(state):
        wide, tall = state[a].double(), state[b].double()
        norms[layer] = float(((tall.T @ tall) * (wide @ wide.T)).sum().clamp(min=0).sqrt())
    return norms


def heads(states: Sequence[State], weights: Sequence[float]) -> dict[str, Tensor]:
    """The mean of the entries that are no adapter's: those of a head that is trained whole."""
    names = [name for name in states[0] if factor_of(name) == HEAD]
    return mean([state.pick(names) for state in states], weights).tensors() if names else {}


def rebuilt(like: State, entries: Mapping[str, Tensor]) -> State:
    """A state with the entries of `like` in their order and dtype."""
    return State.of({name: entries[name].to(like.row) for name in like})


def cut(like: State, entries: dict[str, Tensor], pairs: Mapping[str, Pair], rank: int) -> State:
    """An adapter of this rank that adds, by layer, as much as it can of the product of a pair: B = U S and A = V of its
    singular value decomposition. `entries`: what is not of these layers."""
    for layer, (b, a) in pairs.items():
        u, s, v = decomposed(b, a, rank)
        entries |= {f"{layer}.{FACTORS[0]}": v[:rank], f"{layer}.{FACTORS[1]}": u[:, :rank] * s[:rank]}
    return resized(rebuilt(like, entries), rank)  # a layer narrower than the rank has fewer components
