"""The quickstart's federation with clients that lie, under each rule of `server.aggregation`: what the honest ones get.

    OMP_NUM_THREADS=1 nice -n 10 python scripts/studies/attacks.py --draws 10 --out runs/analysis/attacks.jsonl

Runs are simulated in one process: liars train like everybody, and what they send is changed on its way (or, for
`poison`, what they train on). The file holds a line per run, in the order draw, share, method, attack, rule; the same
command goes on after what is there. `--table` trains nothing and prints, of what the file holds, the mean test score of
the clients that do not lie, which rules are shown to differ from the mean (docs/verdict.md), and with its interval how
every rule differs from it where nobody lies.

none     nobody lies: what a rule costs
flip     the update with its sign turned
flip9    nine times the update with its sign turned: just within `norm_bound`
noise    Gaussian noise nine times as long as the update
replay   the first update, in every round
collude  all liars send the honest mean minus 1.5 standard deviations in each number ("A Little Is Enough": Baruch,
         Baruch, Goldberg 2019; they know what the honest ones send)
poison   honest training on false labels: the next pen in the place of the right one
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console

import llm_fed
from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import derive, generator
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.build import prepare
from llm_fed.eval.pairs import compare_methods
from llm_fed.eval.scripting import plain_errors
from llm_fed.eval.variance import Design
from llm_fed.federation.clients import LocalClients, Messages
from llm_fed.federation.loop import Federation, federate
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.state import State, stack
from llm_fed.tasks.common import ClientData, TaskData

ASSETS = Path(llm_fed.__file__).parent / "assets"
ATTACKS = ("none", "flip", "flip9", "noise", "replay", "collude", "poison")
RULES = ("mean", "median", "trimmed-mean", "multi-krum", "geometric-median", "centered-clipping", "krum")
METHODS = {
    "fedit": ["method={name: fedit}"],
    "fedmerge": [],  # as the quickstart has it
    "feddle": ["method={name: feddle}", "task.server.examples=32"],
    "fedsa": ["method={name: fedsa}"],
    "fedprox": ["method={name: fedprox}"],
}
FACTOR, APART = 9.0, 1.5  # of flip9 and noise; z of collude
ROUNDS, CLIENTS = 40, 12


class Lying(LocalClients):
    """Clients of whom some change what they send."""

    def __init__(self, liars: Sequence[str], attack: str, seed: int, *args: Any):
        super().__init__(*args)
        self._liars, self._attack, self._seed, self._first = liars, attack, seed, dict[str, State]()

    def _ask(self, method: Any, messages: Mapping[str, bytes], round: int, lr: float, then: Any = None) -> Any:
        answers: dict[str, Any] = super()._ask(method, messages, round, lr, then)
        honest = stack(answer for name, answer in answers.items() if name not in self._liars)
        for name in self._liars:
            answers[name] = self._lie(name, answers[name], honest, round)
        return answers

    def _lie(self, name: str, own: State, honest: torch.Tensor, round: int) -> State:
        """What a liar sends in the place of its update, knowing those of the others (n, P)."""
        if self._attack in ("flip", "flip9"):
            return own * (-FACTOR if self._attack == "flip9" else -1.0)
        if self._attack == "noise":
            noise = torch.randn(own.row.shape, generator=generator(self._seed, "attack", name, round))
            return own.like(noise * (FACTOR * own.norm() / float(noise.norm())))
        if self._attack == "replay":
            return self._first.setdefault(name, own)
        if self._attack == "collude":
            return own.like(honest.mean(0) - APART * honest.std(0))
        return own


def liars_of(task: TaskData, share: float, seed: int) -> list[str]:
    """The same in all runs of a draw."""
    count = round(share * len(task.clients))
    return sorted(random.Random(derive(seed, "liars")).sample(sorted(task.clients), count))


def poisoned(data: ClientData) -> ClientData:
    train = []
    for example in data.train:
        wrong = example.options[(example.options.index(example.answers[0]) + 1) % len(example.options)]
        train.append(replace(example, answers=(wrong,)))
    return replace(data, train=tuple(train))


def run(method: str, attack: str, rule: str, share: float, draw: int, rounds: int, dtype: str) -> dict[str, float]:
    """The test score of each client that does not lie, after the last round."""
    words = [*METHODS[method], f"seed={draw}", f"rounds={rounds}", "device=cpu", "eval={every: 0, base: false}",
             f"checkpoint.every={rounds}", f"base.name={ASSETS / 'tiny-base'}", f"base.dtype={dtype}"]  # fmt: skip
    if rule != "mean":  # the server's guess is right
        words += [f"server.aggregation={rule}", f"server.liars={round(share * CLIENTS) / CLIENTS}"]
    config = configfile.load(ASSETS / "quickstart.yaml", words)
    task = tasks.load(config.task, config.federation_seed, config.evaluation_seed)
    liars = liars_of(task, share, draw)
    if attack == "poison":
        lying = {name: poisoned(task.clients[name]) for name in liars}
        task = replace(task, clients={**task.clients, **lying})
    built = prepare(config, Reporter(Console(quiet=True)), task=task)
    with TemporaryDirectory() as folder, Run(Path(folder) / "run", built.config) as made:
        made.begin()
        changed = [] if attack == "none" else liars
        clients = Lying(changed, attack, draw, built.clients, built.schedule, built.runtime)
        progress = federate(Federation(built.method, clients, built.server, built.runtime), made)
    summary = built.evaluate(Messages(built.method, progress.state, built.clients), "test")
    assert summary is not None
    return {name: score for name, score in summary.clients.items() if name not in liars}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each method, share and attack, and a column for each rule; a rule that is shown to be better or worse
    than the mean has a + or - beside its score, and below the table its interval."""
    cells: dict[tuple[Any, ...], dict[str, dict[tuple[int, int], dict[str, float]]]] = {}
    for line in lines:
        key = (line["share"], line["method"], line["attack"])
        cells.setdefault(key, {}).setdefault(line["rule"], {})[line["draw"], 0] = line["scores"]
    order = {name: place for place, name in enumerate((*METHODS, *ATTACKS))}
    rules = [rule for rule in RULES if any(rule in by_rule for by_rule in cells.values())]
    text = [f"| lie | method | attack | draws | {' | '.join(rules)} |", "|" + "---|" * (4 + len(rules))]
    shown = []
    for (share, method, attack), by_rule in sorted(cells.items(), key=lambda cell: [order.get(k, k) for k in cell[0]]):
        marks = dict.fromkeys(rules, "")
        for pair in compare_methods(by_rule, Design("federations")).pairs:
            if "mean" not in (pair.first, pair.second):
                continue
            if pair.claim == "greater":
                better = pair.second == "mean"
                marks[pair.first if better else pair.second] = " +" if better else " -"
            if pair.claim == "greater" or attack == "none":
                shown.append(f"- {share:.0%}, {method}, {attack}: {pair}")
        row = [_cell(by_rule.get(rule, {}), marks[rule]) for rule in rules]
        draws = sorted({len(values) for values in by_rule.values()})
        text.append(f"| {share:.0%} | {method} | {attack} | {'-'.join(map(str, draws))} | {' | '.join(row)} |")
    return "\n".join([*text, "", *(shown or ["No difference from the mean is shown."])])


def _cell(scores: Mapping[Any, Mapping[str, float]], mark: str) -> str:
    if not scores:
        return ""
    means = [fmean(clients.values()) for clients in scores.values()]
    spread = f" ± {stdev(means):.1f}" if len(means) > 1 else ""
    return f"{fmean(means):.1f}{spread}{mark}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["fedit", "fedmerge"])
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=list(ATTACKS))
    parser.add_argument(
        "--rules", nargs="+", choices=RULES, default=list(RULES[:-1]), help="aggregation rules (fedmerge refuses krum)"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25], help="shares of lying clients")
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="as base.dtype")
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/attacks.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of finished runs")
    asked = parser.parse_args()
    with plain_errors(parser):
        lines = read_records(asked.out)
        kind: dict[str, Any] = {"rounds": asked.rounds, "dtype": asked.dtype}
        if other := [line for line in lines if any(line[key] != value for key, value in kind.items())]:
            raise UserError(
                f"{asked.out} has runs of {other[0]['rounds']} rounds in {other[0]['dtype']}; give another --out"
            )
        if not asked.table:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            keys = ("draw", "share", "method", "attack", "rule")
            done = {tuple(line[key] for key in keys) for line in lines}
            for cell in product(range(asked.draws), asked.shares, asked.methods, asked.attacks, asked.rules):
                if cell in done:
                    continue
                draw, share, method, attack, rule = cell
                scores = run(method, attack, rule, share, draw, **kind)
                lines.append(dict(zip(keys, cell, strict=True)) | kind | {"scores": scores})
                with asked.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print(*cell, f"{fmean(scores.values()):.1f}", flush=True)
        print(table([line for line in lines if line["draw"] < asked.draws]))


if __name__ == "__main__":
    with lasting_streams():
        main()
