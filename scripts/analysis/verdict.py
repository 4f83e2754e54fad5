"""How far the verdict of `llm-fed compare` can be trusted: false claims, coverage and power on made-up score tables.

    python scripts/analysis/verdict.py --tables 10000 --out runs/analysis/verdict.csv

False claims: the share of tables of four equal methods with at least one claim. Coverage: the share of tables, of four
methods that are 0, 1, 2 and 4 points better, all of whose six intervals hold their true differences; `one` is the share
of single intervals. Power: the share of pairs with a difference of so many points that are claimed.
"""

from __future__ import annotations

import argparse
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
from results import plain_errors, write_rows
from score_tables import METHODS, SHAPES, average, worst_half

from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.pairs import MethodPairs, compare_methods

EFFECTS = (0.0, 1.0, 2.0, 4.0)
QUANTITIES = {"average": average, "worst half": worst_half}
COLUMNS = ("quantity", "shape", "draws", "false claims", "coverage", "one", "power 1", "power 2", "power 4")


def verdicts(values: np.ndarray) -> list[MethodPairs]:
    """Of each table (count, methods, draws) its verdict."""
    return [
        compare_methods({f"{m}": {(k, 0): x for k, x in enumerate(row)} for m, row in enumerate(table)})
        for table in values.tolist()
    ]


def measure(shape: str, draws: int, count: int) -> list[list[str | int | float]]:
    """A row of COLUMNS for each quantity."""
    make, rows = SHAPES[shape], []
    rng = np.random.default_rng((list(SHAPES).index(shape), draws))
    equal = make(rng, count, draws, (0.0,) * METHODS)
    unequal = make(rng, count, draws, EFFECTS)
    large = make(rng, 2000, 100, EFFECTS)
    none = make(rng, 2000, 100, (0.0,) * METHODS)
    for name, quantity in QUANTITIES.items():
        truth = quantity(large).mean(axis=(0, 2))
        null = quantity(none).mean(axis=(0, 2))
        differ = max(abs(a - b) for a, b in combinations(null.tolist(), 2)) > 0.1  # then no claim would be false
        claimed = fmean(any(pair.claim == "greater" for pair in c.pairs) for c in verdicts(quantity(equal)))
        all_held, held = [], []
        power: dict[int, list[bool]] = {1: [], 2: [], 4: []}
        for column in verdicts(quantity(unequal)):
            inside = []
            for pair in column.pairs:
                a, b = int(pair.first), int(pair.second)
                if pair.low is None or pair.high is None:
                    inside.append(False)
                    continue
                inside.append(bool(pair.low <= truth[a] - truth[b] <= pair.high))
                size = abs(round(EFFECTS[a] - EFFECTS[b]))
                if size in power:
                    power[size].append(pair.low > 0 and a > b)
            all_held.append(all(inside))
            held += inside
        rates = [fmean(all_held), fmean(held), *(fmean(detected) for detected in power.values())]
        rows.append([name, shape, draws, "" if differ else claimed, *rates])
    return rows


def impatient(count: int, draws: int) -> float:
    """The share of tables of equal methods with a claim at some look, of somebody who looks after each draw from the
    third to the last."""
    values = average(SHAPES["normal"](np.random.default_rng(0), count, draws, (0.0,) * METHODS))
    claimed = np.zeros(count, bool)
    for seen in range(3, draws + 1):
        claimed |= [any(pair.claim == "greater" for pair in column.pairs) for column in verdicts(values[:, :, :seen])]
    return float(claimed.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=10_000, help="simulated tables per shape and draws")
    parser.add_argument("--draws", type=int, nargs="+", default=[3, 5, 10, 30])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/verdict.csv"))
    parser.add_argument("--impatient", type=int, metavar="DRAWS", help="only simulate stopping at the first claim")
    asked = parser.parse_args()
    if asked.impatient:
        print(f"{impatient(asked.tables, asked.impatient):.1%} of {asked.tables} tables have a claim at some look")
        return
    rows = []
    for shape in asked.shapes:
        for draws in asked.draws:
            rows += measure(shape, draws, asked.tables)
            for row in rows[-len(QUANTITIES) :]:
                print(" | ".join(f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row), flush=True)
    with plain_errors(parser):
        write_rows(asked.out, COLUMNS, rows)


if __name__ == "__main__":
    with lasting_streams():
        main()
