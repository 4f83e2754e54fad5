"""How often a run would warn where nothing is wrong, in simulated tables of scores. Nothing is trained.

In each table the models of all clients, and the base, answer each example alike on average, so that any warning is
false. This is the worst case of "nothing is wrong": in a healthy run a model is better on its own examples.

    python scripts/studies/warning_tables.py --tables 2000
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.warning import Cross, Scores, warnings_of

CLIENTS = [f"client-{number}" for number in range(5)]
ROUNDS = 20
SHAPES = {"right or wrong": (0.1, 0.5, 0.9), "0 to 100": (0.1, 0.5, 0.9)}  # by kind of scores their means


def scores(rng: np.random.Generator, kind: str, mean: float, hardness: np.ndarray) -> list[float]:
    """Of the examples of a client, which are of unlike hardness."""
    chance = np.clip(mean + hardness, 0.01, 0.99)
    if kind == "right or wrong":
        return (100.0 * (rng.random(len(chance)) < chance)).tolist()
    return (100 * rng.beta(4 * chance, 4 * (1 - chance))).tolist()


def kinds(rng: np.random.Generator, kind: str, mean: float, examples: int) -> list[str]:
    """The kinds of warnings of one table."""
    hardness = {id: rng.normal(0, 0.15, examples) for id in CLIENTS}

    def drawn() -> dict[str, list[float]]:
        return {id: scores(rng, kind, mean, hardness[id]) for id in CLIENTS}

    own, base = drawn(), drawn()
    cross = Cross({(k, id): own[id] if k == id else scores(rng, kind, mean, hardness[id]) for k in CLIENTS
                   for id in CLIENTS}, base)  # fmt: skip
    means = [Scores({id: float(np.mean(values)) for id, values in its.items()}, its) for its in (own, base)]
    losses = {id: {round: 2 - 0.01 * round + rng.normal(0, 0.1) for round in range(ROUNDS)} for id in CLIENTS}
    found = warnings_of(means[0], {"base": means[1]}, dict.fromkeys(CLIENTS, examples), cross, losses)
    return [warned["kind"] for warned in found]


def rates(tables: int, sizes: Sequence[int]) -> Table:
    table = Table("scores", "mean", "examples", "any, %", "below-base, %", "another-model, %", "gains-elsewhere, %",
                  "loss-rises, %")  # fmt: skip
    for kind, means in SHAPES.items():
        for mean in means:
            for examples in sizes:
                rng, counts = np.random.default_rng((int(100 * mean), examples)), Counter[str]()
                for _ in range(tables):
                    found = kinds(rng, kind, mean, examples)
                    counts.update([*set(found), *(["any"] if found else [])])
                names = ("any", "below-base", "another-model", "gains-elsewhere", "loss-rises")
                cells = [f"{100 * counts[name] / tables:.1f}" for name in names]
                table.add_row(kind, f"{100 * mean:.0f}", str(examples), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=2000)
    parser.add_argument("--examples", type=int, nargs="+", default=[8, 20, 50])
    asked = parser.parse_args()
    Console(width=120).print(rates(asked.tables, asked.examples))


if __name__ == "__main__":
    with lasting_streams():
        main()
