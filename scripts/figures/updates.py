"""How far single clients' updates agree with the true one, the mean over all clients by their numbers of examples, from
the same model; and the true ones of different rounds with each other (Feddle, Figure 2).

The model goes the way of federated averaging without delays: each round's cohort is weighed by numbers of examples. All
other settings are those of CONFIG. Every `--every`-th round the true update is measured, with `--clients` on so many
clients drawn anew that are not in the cohort, for all are many: 500 clients of five epochs are 50 rounds' work.
Writes OUT/cosines.csv and .png (by round, with the least and the largest of the cohort) and OUT/between.csv and .png.

    python scripts/figures/updates.py CONFIG.yaml key=value ... --alphas 0.1 0.3 10 --rounds 20 --clients 50 --out OUT
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import torch
from rich.console import Console

from llm_fed.basics.rng import generator
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench import build
from llm_fed.eval.plots import plot_bands
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.federation.schedule import Synchronous
from llm_fed.merge import mean
from llm_fed.runs import extend
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.state import State


def trained(built: build.Experiment, model: State, names: Sequence[str], round: int) -> dict[str, State]:
    """The update of each of these clients."""
    for name in names:
        built.clients[name].begin(round, extend.lr(built.config, round))
    outcomes = built.runtime.run({name: built.clients[name].fit(model) for name in names})
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return {name: theta - model for name, theta in outcomes.items()}


def weighted(built: build.Experiment, deltas: dict[str, State]) -> State:
    return mean(list(deltas.values()), [built.clients[name].num_examples for name in deltas])


def cosine(one: State, other: State) -> float:
    return float(torch.nn.functional.cosine_similarity(one.row.double(), other.row.double(), dim=0))


def measure(
    built: build.Experiment, rounds: int, every: int, clients: int | None
) -> tuple[list[tuple[int, str, int, float]], dict[int, State]]:
    """(round, client, its examples, cosine with the true update) of each cohort measured, and the true updates."""
    names = tuple(built.clients)
    schedule = Synchronous(names, built.config.participation, built.config.seed)
    model, rows, true = built.server.initial(), [], {}
    for round in range(1, rounds + 1):
        deltas = trained(built, model, [ask.client for ask in schedule.asks(round)], round)
        if (round - 1) % every == 0:
            others = [name for name in names if name not in deltas]
            if clients is not None:
                drawn = torch.randperm(len(others), generator=generator(built.config.seed, "updates", round))
                others = [others[i] for i in drawn[:clients].tolist()]
            measured = trained(built, model, others, round)
            true[round] = weighted(built, measured if clients is not None else measured | deltas)
            sizes = {name: built.clients[name].num_examples for name in deltas}
            rows += [(round, name, sizes[name], cosine(delta, true[round])) for name, delta in deltas.items()]
        model = model + weighted(built, deltas)
    return rows, true


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("words", nargs="*", default=[])
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.3, 10.0], help="Dirichlet concentrations")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--clients", type=int, help="clients to estimate the true update from (default: all)")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_intermixed_args()
    cosines, between, curves, by_distance = [], [], {}, {}
    with plain_errors(parser):
        for alpha in given.alphas:
            words = [*given.words, "task.partition.kind=dirichlet", f"task.partition.alpha={alpha}"]
            built = build.prepare(configfile.load(given.config, words), Reporter(Console(quiet=True)))
            rows, true = measure(built, given.rounds, given.every, given.clients)
            pairs = [(one, other, cosine(true[one], true[other])) for one, other in combinations(true, 2)]
            cosines += [(alpha, *row) for row in rows]
            between += [(alpha, *pair) for pair in pairs]
            curves[f"Dir({alpha:g})"] = spread([(round, value) for round, _, _, value in rows])
            by_distance[f"Dir({alpha:g})"] = spread([(other - one, value) for one, other, value in pairs])
    write_rows(given.out / "cosines.csv", ("alpha", "round", "client", "examples", "cosine"), cosines)
    write_rows(given.out / "between.csv", ("alpha", "round", "later", "cosine"), between)
    what = "cosine with the true update"
    plot_bands(given.out / "cosines.png", curves, xlabel="round", ylabel=what)
    plot_bands(given.out / "between.png", by_distance, xlabel="rounds between", ylabel="cosine of true updates")


def spread(points: list[tuple[int, float]]) -> tuple[list[int], list[float], list[float], list[float]]:
    """By x: the mean, the lowest and the highest value."""
    by_x: dict[int, list[float]] = {}
    for x, value in points:
        by_x.setdefault(x, []).append(value)
    groups = dict(sorted(by_x.items()))
    return (
        list(groups),
        [sum(values) / len(values) for values in groups.values()],
        [min(values) for values in groups.values()],
        [max(values) for values in groups.values()],
    )


if __name__ == "__main__":
    with lasting_streams():
        main()
