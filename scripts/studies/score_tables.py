"""Made-up score tables (methods x draws x clients, 0-100) of several shapes of noise, to try a verdict on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

METHODS, CLIENTS = 4, 10
Noise = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]  # of mean 0 and standard deviation about 1


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def skewed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 1 - rng.exponential(size=shape)


def heavy(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, shape) / 3**0.5


def additive(noise: Noise, draw: Sequence[float] = (1.5,) * METHODS, client: Sequence[float] = (4.0,) * METHODS):
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


def collapse(rng: np.random.Generator, count: int, draws: int, effects: Sequence[float]) -> np.ndarray:
    """The first method loses 10 points in a tenth of its runs, and is as good as the others on average."""
    scores = additive(normal)(rng, count, draws, effects)
    scores[:, 0] += 1 - 10 * (rng.random((count, draws, 1)) < 0.1)
    return scores


SHAPES = {
    "normal": additive(normal),
    "skewed": additive(skewed),
    "heavy-tailed": additive(heavy),
    "unequal variances": additive(normal, (0.5, 1.0, 2.0, 4.0), (1.0, 2.0, 4.0, 8.0)),
    "clients move together": additive(normal, (2.5,) * METHODS, (0.5,) * METHODS),
    "bounded, near 100": bounded,
    "one method collapses": collapse,
}


def average(scores: np.ndarray) -> np.ndarray:
    """(..., draws, clients) to (..., draws)."""
    return scores.mean(axis=-1)


def worst_half(scores: np.ndarray) -> np.ndarray:
    """The mean of the ceil(n / 2) lowest clients."""
    return np.sort(scores, axis=-1)[..., : (scores.shape[-1] + 1) // 2].mean(axis=-1)
