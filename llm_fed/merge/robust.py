"""Robust means: aggregates of what n clients send that a few of them, whatever they send, cannot move far.

Each rule takes the uploads as rows x_i (n, P) and their shares p_i of the whole, which sum to 1. Two rules look at each
coordinate by itself, the others at the distances between whole uploads alone: what these give is sum_i c_i x_i with
coefficients c (n,), found from the n x n inner products. Running statistics (extras) are in no distance, so anything
could come with a usual row: they are always taken by coordinate, with the trimmed mean under `trimmed-mean` and the
median under every other rule.

- median: the weighted median of each coordinate (Yin, Chen, Ramchandran, Bartlett 2018, Definition 1). With an even
  split the mean of the two middle values.
- trimmed-mean: of each coordinate the weighted mean without the share `liars` at either end (ibid., Definition 2).
- krum: the one upload with the least sum of squared distances to its n - f - 2 nearest others, f = ceil(liars * n)
  (Blanchard, El Mhamdi, Guerraoui, Stainer 2017). Shares do not count.
- multi-krum: the weighted mean of the n - f uploads with the best scores of Krum; shares count in the mean alone. The
  paper leaves their number open.
- geometric-median: the point with the least sum_i p_i ||x_i - v||, by the smoothed Weiszfeld algorithm (Pillutla,
  Kakade, Harchaoui 2022).
- centered-clipping: v <- v + sum_i p_i (x_i - v) min(1, radius / ||x_i - v||) (Karimireddy, He, Jaggi 2021).

Deviation: the papers count all clients alike. Here shares count, as in the mean that a rule stands in for, and no
client has more than the share `liars`: with equal shares it is the papers' rule (`test_each_rule_by_hand`).
Deviation: centered clipping starts at "no change", and goes CLIPPINGS steps, where the paper starts at the aggregate of
the round before and goes one; without a radius it is the median norm of the uploads (`test_centered_clipping_by_hand`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from llm_fed.settings.config import ServerStepConfig
from llm_fed.state import State, stack

CLIPPINGS = 5  # steps of centered clipping
COLUMNS = 2**16  # of a matrix of uploads that are worked on at once
WEISZFELD = 1000  # most steps, each of n x n products
_TINY = 1e-9  # of a share: what rounding leaves of a sum of shares


def lacking(uploads: int, settings: ServerStepConfig) -> str:
    """What a rule lacks for a mean of so many uploads, in words; empty where nothing does. One liar must never hold
    more than the share that the rule can bear; Krum's proof wants n > 2f + 2."""
    if settings.aggregation == "mean" or _bears(uploads, settings):
        return ""
    least = next(n for n in range(uploads, 10_000) if all(_bears(n + k, settings) for k in range(20)))
    return (
        f"server.aggregation={settings.aggregation} with server.liars={settings.liars:g} needs at least {least} "
        f"uploads for a mean, and there are {uploads}"
    )


def _bears(uploads: int, settings: ServerStepConfig) -> bool:
    if uploads * settings.liars < 1 - _TINY:
        return False
    return "krum" not in settings.aggregation or uploads >= 2 * _liars(uploads, settings) + 3


def _liars(uploads: int, settings: ServerStepConfig) -> int:
    """f: how many of so many uploads may be lies."""
    return math.ceil(settings.liars * uploads - _TINY)


def shares(weights: Sequence[float], most: float) -> Tensor:
    """p (n,), float64: the share of each upload by its weight, but none above `most`, which is at least 1 / n."""
    share = torch.tensor(weights, dtype=torch.float64)
    share = share / share.sum()
    full = torch.zeros_like(share, dtype=torch.bool)
    while ((share > most) & ~full).any():  # what some lose the others get, who may then be over it, too
        full |= share > most
        free = 1 - most * int(full.sum())
        share = torch.where(full, most, share * (free / share[~full].sum().clamp_min(1e-300)))
    return share


def aggregate(states: Sequence[State], weights: Tensor, settings: ServerStepConfig) -> list[State]:
    """For each row of `weights` (d, n) the robust mean of n states of one layout, each counted by its share of the row.
    A row of zeros gives zeros. `settings`: with another rule than the mean."""
    weights = weights.double()
    weights = torch.where(weights > 0, weights / weights.sum(1, keepdim=True), 0.0)
    rows = stack(states)
    floating = [name for name, value in states[0].extras.items() if value.is_floating_point()]
    beside = {name: torch.stack([state.extras[name].reshape(-1) for state in states]) for name in floating}
    cut = settings.liars if settings.aggregation == "trimmed-mean" else 0.5
    extras = {name: by_coordinate(values, weights, cut) for name, values in beside.items()}
    if settings.aggregation in ("median", "trimmed-mean"):
        means = by_coordinate(rows, weights, cut)
    else:
        means = coefficients(inner_products(rows), weights, settings).to(rows.dtype) @ rows
    like = states[0]
    return [
        State(like.layout, row, {**like.extras, **{n: v[j].view(like.extras[n].shape) for n, v in extras.items()}})
        for j, row in enumerate(means)
    ]


def by_coordinate(rows: Tensor, weights: Tensor, cut: float) -> Tensor:
    """(d, P): of each column of `rows` (n, P) the mean without the share `cut` at either end, for each row of `weights`
    (d, n), which sums to 1 or 0; with a cut of 0.5 the median."""
    parts = []
    for part in rows.split(COLUMNS, dim=1):
        values, order = part.sort(dim=0)
        parts.append(torch.stack([_middle(values.double(), share[order], cut) for share in weights]))
    return torch.cat(parts, 1).to(rows.dtype)


def _middle(values: Tensor, share: Tensor, cut: float) -> Tensor:
    """(C,): of sorted columns (n, C), each value with its share of its column."""
    upto = share.cumsum(0)
    if cut < 0.5:
        kept = upto.clamp(max=1 - cut) - (upto - share).clamp(min=cut)
        kept = torch.where(kept > _TINY, kept, 0.0)  # nothing of a value of 1e30, and not what rounding leaves of it
        return (kept * values).sum(0) / kept.sum(0).clamp_min(_TINY)
    lower, upper = ((upto < 0.5 + side).sum(0, keepdim=True) for side in (-_TINY, _TINY))
    low, high = (values.gather(0, index.clamp(max=len(values) - 1))[0] for index in (lower, upper))
    return torch.where(share.sum(0) > 0, low / 2 + high / 2, 0.0)


def inner_products(rows: Tensor) -> Tensor:
    """(n, n), float64: <x_i, x_j>."""
    parts = (part.double() for part in rows.split(COLUMNS, dim=1))
    return torch.stack([part @ part.T for part in parts]).sum(0)


def coefficients(products: Tensor, weights: Tensor, settings: ServerStepConfig) -> Tensor:
    """c (d, n) of the rules that look at whole uploads, for shares (d, n), from the inner products (n, n)."""
    own = products.diagonal()
    distances = (own[:, None] + own[None] - 2 * products).clamp_min(0).sqrt()
    rule = settings.aggregation
    if "krum" in rule:
        best = krum_order(distances, _liars(len(own), settings))
        chosen = torch.zeros_like(own)
        if rule == "krum":
            chosen[best[0]] = 1.0
            return chosen.expand_as(weights)
        chosen[best[: len(own) - _liars(len(own), settings)]] = 1.0
        kept = weights * chosen
        return torch.where(kept > 0, kept / kept.sum(1, keepdim=True), 0.0)
    if rule == "geometric-median":
        return torch.stack([_geometric_median(products, distances, share) for share in weights])
    return torch.stack([_clipped(products, share) for share in weights])


def krum_order(distances: Tensor, liars: int) -> Tensor:
    """The uploads (n,), best score first: the sum of the squared distances to the n - f - 2 nearest others."""
    squared = distances.square().fill_diagonal_(math.inf)
    nearest = squared.topk(len(squared) - liars - 2, dim=1, largest=False).values
    return nearest.sum(1).argsort(stable=True)


def _geometric_median(products: Tensor, distances: Tensor, share: Tensor) -> Tensor:
    """From the upload that is nearest to all others, so that it does not matter how far away a liar is."""
    start = distances[(distances @ share).argmin()]
    scale = _median(start, share)
    if not scale:  # half of the shares lie at one point
        return _normalised(torch.where(start > 0, 0.0, share))
    c = _normalised(share / start.clamp_min(scale))
    for _ in range(WEISZFELD):
        before, c = c, _normalised(share / _distances(products, c).clamp_min(1e-6 * scale))
        if torch.allclose(c, before, rtol=1e-9, atol=0):
            break
    return c


def _clipped(products: Tensor, share: Tensor) -> Tensor:
    limit = _median(products.diagonal().sqrt(), share)
    c = torch.zeros_like(share)
    for _ in range(CLIPPINGS):
        step = share * (limit / _distances(products, c).clamp_min(1e-300)).clamp(max=1)
        c = c * (1 - step.sum()) + step
    return c


def _distances(products: Tensor, c: Tensor) -> Tensor:
    """(n,): of each upload to sum_i c_i x_i."""
    return (products.diagonal() - 2 * products @ c + c @ products @ c).clamp_min(0).sqrt()


def _median(values: Tensor, share: Tensor) -> float:
    ordered, order = values.sort()
    return float(_middle(ordered[:, None], share[order][:, None], 0.5)[0])


def _normalised(c: Tensor) -> Tensor:
    return c / c.sum().clamp_min(1e-300)
