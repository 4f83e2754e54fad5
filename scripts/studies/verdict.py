"""How far the verdict of `llm-fed compare` can be trusted: false claims, coverage and power on made-up score tables.

    python scripts/studies/verdict.py --tables 10000 --out runs/analysis/verdict.csv

False claims: the share of tables of equal methods with at least one claim; `draws alone` is the same of intervals that
take the draws alone as the sample and name no collapse, as version 0.4.0 did everywhere. Coverage: the share of tables,
of methods that differ, all of whose intervals hold their true differences. Power: the share of pairs with a difference
of so many points that are claimed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from score_tables import SHAPES

from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.pairs import between, collapses, critical
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.eval.variance import Design, over_draws

COLUMNS = ("shape", "draws", "draws alone", "false claims", "coverage", "points", "power")


def intervals(values: np.ndarray, design: Design) -> tuple[np.ndarray, np.ndarray]:
    """Of tables (count, methods, draws, clients) both ends of each pair's interval (count, pairs), of which the sign is
    that of the first method less the second; infinite where a method of the pair has collapsed."""
    pairs = list(combinations(range(values.shape[1]), 2))
    differences = np.stack([values[:, a] - values[:, b] for a, b in pairs], axis=1)
    names = [str(client) for client in range(values.shape[-1])]
    found = over_draws(differences) if not design.by_client else design.estimate(differences, names)
    assert found is not None
    half = _critical(values.shape[1], found.df) * np.sqrt(found.floor + found.draw / values.shape[2])
    named = collapsed(values)
    half = np.where(np.stack([named[:, a] | named[:, b] for a, b in pairs], axis=1), np.inf, half)
    return found.value - half, found.value + half


def _critical(methods: int, df: np.ndarray) -> np.ndarray | float:
    whole = df.flat[0]
    return critical(methods, float(whole)) if whole == int(whole) and (df == whole).all() else between(methods, df)


def collapsed(values: np.ndarray) -> np.ndarray:
    """(count, methods): whose draws are of two kinds."""
    means = values.mean(axis=-1)
    methods = range(means.shape[1])
    others = np.stack([np.median(np.delete(means, method, axis=1), axis=1) for method in methods], axis=1)
    return collapses(means, means - others).any(axis=-1)


def claimed(values: np.ndarray, design: Design) -> float:
    """The share of tables with a claim."""
    low, high = intervals(values, design)
    return float(((low > 0) | (high < 0)).any(axis=1).mean())


def draws_alone(values: np.ndarray) -> float:
    """The share of tables in which version 0.4.0 would claim something."""
    methods, draws = values.shape[1:3]
    pairs = [over_draws(values[:, a] - values[:, b]) for a, b in combinations(range(methods), 2)]
    limit = critical(methods, draws - 1)
    return float(np.any([np.abs(own.value) > limit * np.sqrt(own.draw / draws) for own in pairs], axis=0).mean())


def measure(name: str, draws: int, count: int) -> list[str | int | float]:
    """A row of COLUMNS."""
    shape = SHAPES[name]
    rng = np.random.default_rng((list(SHAPES).index(name), draws))
    equal = shape.make(rng, count, draws, (0.0,) * len(shape.effects))
    unequal = shape.make(rng, count, draws, shape.effects)
    truth = (
        shape.make(rng, 2000, 50, shape.effects).mean(axis=(0, 2, 3)) if name == "bounded, near 100" else shape.effects
    )
    low, high = intervals(unequal, shape.design)
    pairs = list(combinations(range(len(shape.effects)), 2))
    true = np.array([truth[a] - truth[b] for a, b in pairs])
    sizes = [abs(shape.effects[a] - shape.effects[b]) for a, b in pairs]
    shown = {size: np.mean([(high[:, k] < 0).mean() for k, own in enumerate(sizes) if own == size]) for size in sizes}
    wanted = [size for size in (1.0, 2.0, 4.0, 8.5) if size in shown]
    power = " ".join(f"{shown[size]:.3f}" for size in wanted)
    covered = float(((low <= true) & (true <= high)).all(axis=1).mean())
    points = " ".join(f"{size:g}" for size in wanted)
    return [name, draws, draws_alone(equal), claimed(equal, shape.design), covered, points, power]


def impatient(count: int, draws: int) -> float:
    """The share of tables of equal methods with a claim at some look, of somebody who looks after each draw from the
    third to the last."""
    shape = SHAPES["normal"]
    values = shape.make(np.random.default_rng(0), count, draws, (0.0,) * len(shape.effects))
    found = np.zeros(count, bool)
    for seen in range(3, draws + 1):
        low, high = intervals(values[:, :, :seen], shape.design)
        found |= ((low > 0) | (high < 0)).any(axis=1)
    return float(found.mean())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=10_000, help="simulated tables per shape and draws")
    parser.add_argument("--draws", type=int, nargs="+", default=[3, 5, 10, 20])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/verdict.csv"))
    parser.add_argument("--impatient", type=int, metavar="DRAWS", help="only simulate stopping at the first claim")
    asked = parser.parse_args(arguments)
    if asked.impatient:
        print(f"{impatient(asked.tables, asked.impatient):.1%} of {asked.tables} tables have a claim at some look")
        return
    rows = []
    for shape in asked.shapes:
        for draws in asked.draws:
            rows.append(measure(shape, draws, asked.tables))
            print(" | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in rows[-1]), flush=True)
    with plain_errors(parser):
        write_rows(asked.out, COLUMNS, rows)


if __name__ == "__main__":
    with lasting_streams():
        main()
