"""The variance of a mean difference of two rows, by what a draw draws anew. Differences are d (n draws, K clients).

- New federations, or new trainings of one: the draws alone are the sample (`over_draws`).
- New splits of the same clients' rows, or test rows that stay: draws and clients are crossed samples (`crossed`;
  Searle, Casella and McCulloch 1992), with the variance (MS_client + MS_draw - MS_error) / (n K) and degrees of freedom
  by Satterthwaite (1946). What a client's rows have in common in all draws is an effect of the client.
- New splits, and a claim about these clients alone: the tested rows of two draws overlap, so further draws tell less
  than new ones would. Of q tested of N rows it is sd^2 (1 / n + q / (N - q)) (`resplit`; Nadeau and Bengio 2003).

Each is floor + draw / n: what no number of draws gets below, and what they shrink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

LEAST = 3  # draws; of two a standard deviation is little more than a guess
LEAST_CLIENTS = 4  # of fewer the clients are no sample

Drawn = Literal["federations", "splits", "fixed", "trainings"]


@dataclass(frozen=True)
class MeanDifference:
    """Mean differences (...,), in points, and what their intervals are made of."""

    value: np.ndarray
    draw: np.ndarray  # variance that one draw adds
    floor: np.ndarray  # variance that draws do not shrink
    df: np.ndarray  # degrees of freedom of Student's t
    clients: int = 0  # that are a sample, too; 0: they are not


def over_draws(differences: np.ndarray) -> MeanDifference:
    """Of (..., n, K) with the draws as the sample; the clients of a draw are averaged first."""
    means = differences.mean(axis=-1)
    variance = means.var(axis=-1, ddof=1)
    return MeanDifference(
        means.mean(axis=-1), variance, np.zeros_like(variance), np.full_like(variance, means.shape[-1] - 1)
    )


def resplit(differences: np.ndarray, ratios: np.ndarray) -> MeanDifference:
    """Of (..., n, K), about these clients; `ratios` (K,) are each one's tested rows over the others, q / (N - q). They
    count by how much their client varies over the draws, so equal ones are Nadeau and Bengio's."""
    plain = over_draws(differences)
    weights = differences.var(axis=-2, ddof=1)
    total = weights.sum(axis=-1)
    ratio = (weights * ratios).sum(axis=-1) / np.where(total > 0, total, 1)
    return MeanDifference(plain.value, plain.draw, plain.draw * ratio, plain.df)


def crossed(differences: np.ndarray) -> MeanDifference:
    """Of (..., pairs, n, K) with draws and clients as samples. Components below 0 are 0. The pairs share their degrees
    of freedom: each alone claimed falsely in up to 13 % of tables of four rows. For the same reason there are at most
    the square of the smaller sample's, and of three draws no more than their two."""
    n, clients = differences.shape[-2:]
    value = differences.mean(axis=(-2, -1))
    by_client, by_draw = differences.mean(axis=-2), differences.mean(axis=-1)
    rest = differences - by_client[..., None, :] - by_draw[..., None] + value[..., None, None]
    of_client = n * by_client.var(axis=-1, ddof=1)
    of_draw = clients * by_draw.var(axis=-1, ddof=1)
    error = (rest**2).sum(axis=(-2, -1)) / ((clients - 1) * (n - 1))
    floor = np.maximum(of_client - error, 0) / (n * clients)
    draw = np.maximum(of_draw, error) / clients
    shared = [squares.mean(axis=-1, keepdims=True) for squares in (of_client, of_draw, error)]
    total = np.maximum(shared[0] - shared[2], 0) + np.maximum(shared[1], shared[2])
    parts = shared[0] ** 2 / (clients - 1) + shared[1] ** 2 / (n - 1) + shared[2] ** 2 / ((clients - 1) * (n - 1))
    least = min(n, clients) - 1
    df = np.clip(total**2 / np.where(parts > 0, parts, 1), least, least**2 if n > LEAST else least)
    return MeanDifference(value, draw, floor, np.broadcast_to(df, value.shape), clients)


def degrees(floor: float, draw: float, draws: int, clients: int) -> float:
    """Degrees of freedom that so many draws would have, of the variance of an `MeanDifference`."""
    if not clients:
        return draws - 1
    total = floor**2 / (clients - 1) + (draw / draws) ** 2 / (draws - 1)
    return max((floor + draw / draws) ** 2 / total, min(draws, clients) - 1)


@dataclass(frozen=True)
class Design:
    """What a draw draws anew, which decides what a sample is."""

    # federations with their clients; splits of the same clients' rows, and with them start and batches; fixed: start
    # and batches (and training rows), while test rows stay; trainings: start and batches of one federation
    drawn: Drawn
    shares: Mapping[str, float] = field(default_factory=dict)  # by client which part is tested, of splits, if known
    these: bool = False  # claims are about these clients alone, and not about others of the kind

    @property
    def by_client(self) -> bool:
        """Whether the draws have their clients in common."""
        return self.drawn in ("splits", "fixed")

    def sample(self, clients: int) -> Literal["draws", "resplits", "crossed"]:
        """What the sample is where so many clients are in all draws."""
        if self.by_client and clients >= LEAST_CLIENTS and not self.these:
            return "crossed"
        return "resplits" if self.drawn == "splits" else "draws"

    def estimate(self, differences: np.ndarray, clients: Sequence[str]) -> MeanDifference | None:
        """Of (..., pairs, n, K) of these clients; None where a client's share must be known, and is not."""
        sample = self.sample(len(clients))
        if sample == "resplits":
            if not all(0 < self.shares.get(client, 0) < 1 for client in clients):
                return None
            shares = np.array([self.shares[client] for client in clients])
            return resplit(differences, shares / (1 - shares))
        return crossed(differences) if sample == "crossed" else over_draws(differences)
