"""Made-up score tables (methods x draws x clients, in points) of several kinds of draws and noise, to try a verdict
on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from llm_fed.eval.variance import Design

METHODS, CLIENTS = 4, 10
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]  # of mean 0 and standard deviation about 1
Tables = Callable[[np.random.Generator, int, int, Sequence[float]], np.ndarray]  # (count, methods, draws, clients)


@dataclass(frozen=True)
class Shape:
    """Tables of a kind: rng, count, draws and the methods' effects make (count, methods, draws, clients)."""

    make: Tables
    design: Design = Design("federations")
    effects: tuple[float, ...] = (0.0, 1.0, 2.0, 4.0)  # of the methods, where they differ


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 1 - rng.exponential(size=shape)


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, shape) / 3**0.5


def additive(
    noise: Noise, draw: Sequence[float] = (1.5,) * METHODS, client: Sequence[float] = (4.0,) * METHODS
) -> Tables:
    """Scores are sums: the federation, its clients, the method, and noise of a whole run and of each client, whose
    standard deviations (points) are `draw` and `client` of each method."""

    def tables(rng: np.random.Generator, count: int, draws: int, effects: Sequence[float]) -> np.ndarray:
        shape = (count, METHODS, draws, CLIENTS)
        shared = 5 * rng.standard_normal((count, 1, draws, 1)) + 15 * rng.standard_normal((count, 1, draws, CLIENTS))
        of_run = np.reshape(draw, (METHODS, 1, 1)) * noise(rng, (*shape[:-1], 1))
        of_client = np.reshape(client, (METHODS, 1, 1)) * noise(rng, shape)
        return 60 + np.reshape(effects, (METHODS, 1, 1)) + shared + of_run + of_client

    return tables


def bounded(rng: np.random.Generator, count: int, draws: int, effects: Sequence[float]) -> np.ndarray:
    """Right answers of 20: clients near the ceiling (90 % on average), whose chances the run shifts; an effect shifts
    the chances before they are cut at 1."""
    chance = rng.beta(6, 1, (count, 1, draws, CLIENTS)) + 0.02 * rng.standard_normal((count, METHODS, draws, 1))
    chance = chance + np.reshape(effects, (METHODS, 1, 1)) / 100
    return 5.0 * rng.binomial(20, np.clip(chance, 0, 1))


def collapse(rng: np.random.Generator, count: int, draws: int, effects: Sequence[float], points: float) -> np.ndarray:
    """The first method loses so many points in a tenth of its runs, and is as good as the others on average."""
    scores = additive(normal)(rng, count, draws, effects)
    scores[:, 0] += points / 10 - points * (rng.random((count, draws, 1)) < 0.1)
    return scores


def resplit(
    rng: np.random.Generator, count: int, draws: int, effects: Sequence[float], clients: int, rows: int, tested: int
) -> np.ndarray:
    """Each draw tests other rows of the same pool; rows differ by 40 points between two methods, whole runs by 2."""
    of_row = 40 / 2**0.5 * rng.standard_normal((count, len(effects), clients, rows))
    scores = 2 / 2**0.5 * rng.standard_normal((count, len(effects), draws, 1)) + np.zeros(clients)
    for draw in range(draws):
        chosen = rng.random((count, 1, clients, rows)).argpartition(tested, axis=-1)[..., :tested]
        scores[:, :, draw] += np.take_along_axis(
            of_row, np.broadcast_to(chosen, (*of_row.shape[:-1], tested)), -1
        ).mean(-1)
    return 60 + np.reshape(effects, (-1, 1, 1)) + scores


def given_rows(
    rng: np.random.Generator, count: int, draws: int, effects: Sequence[float], clients: int, tested: int
) -> np.ndarray:
    """The same with test rows that no draw changes."""
    of_rows = 40 / (2 * tested) ** 0.5 * rng.standard_normal((count, len(effects), 1, clients))
    of_run = 2 / 2**0.5 * rng.standard_normal((count, len(effects), draws, 1))
    return 60 + np.reshape(effects, (-1, 1, 1)) + of_rows + of_run


def same_clients(
    rng: np.random.Generator,
    count: int,
    draws: int,
    effects: Sequence[float],
    clients: int,
    of_client: float = 1.0,
    skew: bool = False,
) -> np.ndarray:
    """Effects of clients (`skew`: exponential ones, of the last method alone), of draws as large as the noise, and
    noise of one point."""
    shape = (count, len(effects), draws, clients)
    of_clients = of_client * (skewed if skew else normal)(rng, (count, len(effects), 1, clients))
    of_clients[:, : -1 if skew else 0] = 0.0
    return (
        60 + np.reshape(effects, (-1, 1, 1)) + of_clients + rng.normal(size=(*shape[:-1], 1)) + rng.normal(size=shape)
    )


def _over_splits(make: Tables, effects: tuple[float, ...], shares: float = 0.2, these: bool = False) -> Shape:
    shared = {str(client): shares for client in range(100)}
    return Shape(make, Design("splits", shared, these), effects)


_FIVE, _THREE = (partial(resplit, clients=clients, rows=40, tested=8) for clients in (5, 3))
SHAPES = {
    "normal": Shape(additive(normal)),
    "skewed": Shape(additive(skewed)),
    "heavy-tailed": Shape(additive(heavy)),
    "unequal variances": Shape(additive(normal, (0.5, 1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0))),
    "clients move together": Shape(additive(normal, (2.5,) * METHODS, (0.5,) * METHODS)),
    "bounded, near 100": Shape(bounded),
    **{
        f"one method collapses by {size} sd": Shape(partial(collapse, points=2 * size))  # a run's sd is about 2 points
        for size in (5, 10, 20)
    },
    "re-split rows, 5 clients": _over_splits(_FIVE, (0.0, 8.5)),
    "re-split rows, these 5 clients": _over_splits(_FIVE, (0.0, 8.5), these=True),
    "re-split rows, 3 clients": _over_splits(_THREE, (0.0, 8.5)),
    "re-split rows, 4 methods": _over_splits(_FIVE, (0.0, 0.0, 0.0, 8.5)),
    "given rows, 5 clients": Shape(partial(given_rows, clients=5, tested=8), Design("fixed"), (0.0, 8.5)),
    **{
        f"draw effects, {clients} clients": _over_splits(partial(same_clients, clients=clients), (0.0, 2.0))
        for clients in (4, 5, 8)
    },
    **{
        f"skewed effects, {clients} clients": _over_splits(
            partial(same_clients, clients=clients, of_client=4.0, skew=True), (0.0, 4.0)
        )
        for clients in (5, 8, 20)
    },
}  # fmt: skip
