"""False claims of other ways to judge a comparison, on the same made-up tables of four equal methods as verdict.py.

    python scripts/studies/candidates.py --tables 2000 --out runs/analysis/candidates.csv

Each is corrected for the six pairs, but for those that say otherwise. A mixed model (method fixed, draws random) with
equal numbers of draws has the same estimates, deviation and degrees of freedom as `tukey`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from itertools import combinations, product
from pathlib import Path

import numpy as np
from scipy import stats
from score_tables import METHODS, SHAPES

from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.pairs import critical
from llm_fed.eval.scripting import plain_errors, write_rows

PAIRS = list(combinations(range(METHODS), 2))
ALPHA = 0.05
RESAMPLES = 500
Judge = Callable[[np.ndarray], np.ndarray]  # (tables, methods, draws, clients) to (tables, pairs): claimed or not


def differences(scores: np.ndarray) -> np.ndarray:
    """(tables, pairs, draws)."""
    means = scores.mean(axis=-1)
    return np.stack([means[:, a] - means[:, b] for a, b in PAIRS], axis=1)


def t_of(values: np.ndarray) -> np.ndarray:
    """Student's t over the last axis."""
    deviation = values.std(axis=-1, ddof=1)
    return np.abs(values.mean(axis=-1)) * values.shape[-1] ** 0.5 / np.where(deviation > 0, deviation, np.inf)


def clients_as_draws(scores: np.ndarray) -> np.ndarray:
    """Student's t over all clients of all draws, with Bonferroni's correction."""
    values = np.stack([(scores[:, a] - scores[:, b]).reshape(len(scores), -1) for a, b in PAIRS], axis=1)
    return t_of(values) > stats.t.ppf(1 - ALPHA / 2 / len(PAIRS), values.shape[-1] - 1)


def student(scores: np.ndarray, pairs: int) -> np.ndarray:
    """Student's t over draws, corrected for so many pairs by Bonferroni."""
    values = differences(scores)
    return t_of(values) > stats.t.ppf(1 - ALPHA / 2 / pairs, values.shape[-1] - 1)


def tukey(scores: np.ndarray) -> np.ndarray:
    """The studentised range with one deviation for all pairs, of the residuals of method + draw."""
    means = scores.mean(axis=-1)
    draws = means.shape[-1]
    rest = means - means.mean(1, keepdims=True) - means.mean(2, keepdims=True) + means.mean((1, 2), keepdims=True)
    df = (METHODS - 1) * (draws - 1)
    error = np.sqrt((rest**2).sum((1, 2)) / df / draws)
    return np.abs(differences(scores).mean(-1)) / error[:, None] > stats.studentized_range.ppf(1 - ALPHA, METHODS, df)


def percentile(scores: np.ndarray, nested: bool) -> np.ndarray:
    """The percentile bootstrap over draws, or over draws and the clients in them, with Bonferroni's correction."""
    rng = np.random.default_rng(0)
    draws, clients = scores.shape[-2:]
    by_client = np.stack([scores[:, a] - scores[:, b] for a, b in PAIRS], axis=1)
    means = np.empty((RESAMPLES, *by_client.shape[:2]))
    for number in range(RESAMPLES):
        weights = rng.multinomial(draws, [1 / draws] * draws)[:, None] / draws * np.full(clients, 1 / clients)
        if nested:
            weights = weights * rng.multinomial(clients, [1 / clients] * clients, draws)
        means[number] = np.tensordot(by_client, weights, 2)
    tail = ALPHA / 2 / len(PAIRS)
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return (low > 0) | (high < 0)


def bca(scores: np.ndarray) -> np.ndarray:
    """The bias-corrected and accelerated bootstrap over draws, with Bonferroni's correction."""
    values = differences(scores)
    draws = values.shape[-1]
    weights = np.random.default_rng(0).multinomial(draws, [1 / draws] * draws, RESAMPLES) / draws
    means = np.sort(values @ weights.T, axis=-1)
    centre = values.mean(-1, keepdims=True)
    below = np.clip((means < centre).mean(-1), 1 / RESAMPLES, 1 - 1 / RESAMPLES)
    bias = stats.norm.ppf(below)
    left_out = (values.sum(-1, keepdims=True) - values) / (draws - 1)
    rest = left_out.mean(-1, keepdims=True) - left_out
    spread = (rest**2).sum(-1)
    acceleration = (rest**3).sum(-1) / (6 * np.where(spread > 0, spread, np.inf) ** 1.5)
    bounds = []
    for tail in (ALPHA / 2 / len(PAIRS), 1 - ALPHA / 2 / len(PAIRS)):
        shifted = bias + stats.norm.ppf(tail)
        places = stats.norm.cdf(bias + shifted / (1 - acceleration * shifted))
        at = np.clip((places * RESAMPLES).astype(int), 0, RESAMPLES - 1)
        bounds.append(np.take_along_axis(means, at[..., None], -1)[..., 0])
    return (bounds[0] > 0) | (bounds[1] < 0)


def studentised(scores: np.ndarray) -> np.ndarray:
    """The studentised bootstrap over draws of the largest |t| of all pairs."""
    values = differences(scores)
    draws = values.shape[-1]
    centred = values - values.mean(-1, keepdims=True)
    rng = np.random.default_rng(0)
    largest = np.stack([t_of(centred[..., rng.integers(0, draws, draws)]).max(-1) for _ in range(RESAMPLES)])
    return t_of(values) > np.quantile(largest, 1 - ALPHA, axis=0)[:, None]


def sign_flips(scores: np.ndarray) -> np.ndarray:
    """Sign flips of whole draws (all 2^n, or RESAMPLES of them): the largest |t| of all pairs."""
    values = differences(scores)
    draws = values.shape[-1]
    if draws <= 8:
        signs = np.array(list(product((-1, 1), repeat=draws)))
    else:
        signs = np.random.default_rng(0).choice((-1, 1), (RESAMPLES, draws))
    largest = np.stack([t_of(values * sign).max(-1) for sign in signs])
    observed = t_of(values)
    return ((largest[..., None] >= observed - 1e-9).mean(axis=0)) <= ALPHA


def largest_t(scores: np.ndarray) -> np.ndarray:
    """What llm_fed does: see llm_fed/eval/pairs.py."""
    values = differences(scores)
    return t_of(values) > critical(METHODS, values.shape[-1] - 1)


JUDGES: dict[str, Judge] = {
    "clients taken for draws": clients_as_draws,
    "t, not corrected": partial(student, pairs=1),
    "t, Bonferroni": partial(student, pairs=len(PAIRS)),
    "Tukey, mixed model": tukey,
    "percentile bootstrap": partial(percentile, nested=False),
    "nested bootstrap": partial(percentile, nested=True),
    "BCa bootstrap": bca,
    "studentised bootstrap": studentised,
    "sign flips": sign_flips,
    "largest t (this one)": largest_t,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2000, help="simulated tables per shape and draws")
    parser.add_argument("--draws", type=int, nargs="+", default=[3, 5, 10, 30])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["normal", "skewed", "unequal variances"])
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/candidates.csv"))
    asked = parser.parse_args()
    rows: list[list[str | int | float]] = []
    for shape, draws in product(asked.shapes, asked.draws):
        make = SHAPES[shape].make
        scores = make(np.random.default_rng(draws), asked.tables, draws, (0.0,) * METHODS)
        better = make(np.random.default_rng(draws), asked.tables, draws, (0.0, 0.0, 0.0, 4.0))
        for name, judge in JUDGES.items():
            power = judge(better)[:, [b == METHODS - 1 for _, b in PAIRS]].mean()
            rows.append([name, shape, draws, float(judge(scores).any(axis=1).mean()), float(power)])
            print(" | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in rows[-1]), flush=True)
    with plain_errors(parser):
        write_rows(asked.out, ("way", "shape", "draws", "false claims", "power 4"), rows)


if __name__ == "__main__":
    with lasting_streams():
        main()
