"""FedPool on planted groups of any number and size: does it find them, and does each of its parts pay?

    OMP_NUM_THREADS=1 python scripts/studies/planted.py OUT --sizes 4 4 4 --draws 3
    OMP_NUM_THREADS=1 python scripts/studies/planted.py OUT --sizes 9 3 --draws 3 --rows oracle fedpool
    OMP_NUM_THREADS=1 python scripts/studies/planted.py OUT --sizes 50 30 20 --participation 0.1 --rounds 400 --draws 1
    OMP_NUM_THREADS=1 python scripts/studies/planted.py OUT --mixed 2 --rows oracle "second oracle" fedpool local

The federation is the quickstart's, with groups of these sizes (one size: all clients alike). `--mixed` adds clients
between the first and the third group: half of the colours are in the pens of the one, half in those of the other.
OUT/planted.jsonl gets a line per run; the same command goes on after what is there. `--table` trains nothing. The
table has the mean exact match on the test prompts at the end, of mixed clients apart, and of each draw the adjusted
Rand index between the true groups and the most probable ones (one group of all, where "no groups" is more probable).

fedpool        as it is
oracle         FedPool that is told the true groups: FedAvg inside them, mixed clients in the first
second oracle  the same, with mixed clients in the third group
no own part    the groups' models alone (`method.personal_share=0`)
no catch-up    groups begin where their clients are (`method.catch_up=0`)
all at once    groups begin where FedAvg inside them would be, had it been so from the first round (`catch_up=1`)
one variance   that of the cosines within groups and between them is taken to be equal
last round     the cosines of the last round's rows, without those of earlier rounds
no memory      a client's row is its last update (`method.memory=0`)
all memory     a client's row is the sum of all its updates (`method.memory=1`)
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from rich.console import Console
from sklearn.metrics import adjusted_rand_score

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.build import prepare
from llm_fed.commands.quickstart import ASSETS
from llm_fed.eval.scripting import plain_errors, spread
from llm_fed.federation.clients import LocalClients, finish, messages_for
from llm_fed.federation.loop import Federation, federate
from llm_fed.methods import fedpool
from llm_fed.methods.fedpool import FedPool
from llm_fed.methods.fedpool import description_length as two_variances
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.state.wire import Message
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.synthetic import GROUP_TRAITS, TRAITS, planted


@dataclass(frozen=True)
class Other(FedPool):
    """FedPool that takes other partitions."""

    row: str = ""
    groups: Mapping[str, int] | None = None

    def probable(self, state: Message) -> tuple[float, float, list[list[str]]]:
        if self.row == "last round":
            return super().probable(state | {"evidence": state["products"]})
        groups = self.groups or {}
        clients = list(state["recent"])
        return (
            0.0,
            1.0,
            [[c for c in clients if groups[c] == number] for number in sorted({groups[c] for c in clients})],
        )


ROWS: dict[str, list[str]] = {
    "local": ["method=local"], "fedit": ["method=fedit"], "fedmerge": ["method.num_models=4"],
    "fedpool": ["method=fedpool"], "oracle": ["method=fedpool"], "second oracle": ["method=fedpool"],
    "no own part": ["method=fedpool", "method.personal_share=0"],
    "no catch-up": ["method=fedpool", "method.catch_up=0"], "all at once": ["method=fedpool", "method.catch_up=1"],
    "one variance": ["method=fedpool"], "last round": ["method=fedpool"],
    "no memory": ["method=fedpool", "method.memory=0"], "all memory": ["method=fedpool", "method.memory=1"],
}  # fmt: skip
OTHERS = ("oracle", "second oracle", "last round")
OWN = 7  # rounds whose steps each client takes alone, after those of the others
MIXED = 0, 2  # the groups between which mixed clients are


def one_variance(rest: float, within: int, groups: int, others: float, between: int, m: int) -> float | None:
    """`fedpool.description_length` of a model in which all cosines have one variance, which it takes where those within
    groups do not vary more than those between them."""
    return two_variances(0.0, within, groups, rest + others, between, m)


def federation(sizes: Sequence[int], mixed: int, seed: int) -> tuple[TaskData, dict[str, int], list[str]]:
    """The task, the group of each client, which is the first of a mixed client's two, and the mixed clients."""
    numbers = [group for group, size in enumerate(sizes) for _ in range(size)] + [MIXED[0]] * mixed
    groups = {f"zoo-{number + 1:02d}": group for number, group in enumerate(numbers)}
    between = list(groups)[len(groups) - mixed :]
    traits = [GROUP_TRAITS[number % 2] for number in range(len(sizes))]
    task = planted(groups, traits, seed)
    if mixed:  # the same animals and prompts, with the answers of the other group
        second = planted({**groups, **dict.fromkeys(between, MIXED[1])}, traits, seed).clients
        task = replace(task, clients={**task.clients, **{c: halves(task.clients[c], second[c]) for c in between}})
    return task, groups, between


def halves(first: ClientData, second: ClientData) -> ClientData:
    """Answers of the first for half of the colours, and of the second for the others."""
    colours = set(TRAITS["colour"][: len(TRAITS["colour"]) // 2])
    splits = {
        name: tuple(
            one if colours & set(one.prompt.split()) else other
            for one, other in zip(getattr(first, name), getattr(second, name), strict=True)
        )
        for name in ("train", "validation", "test")
    }
    return replace(first, **splits)


def run(row: str, sizes: Sequence[int], participation: float, rounds: int, draw: int, mixed: int = 0) -> dict[str, Any]:
    """The clients' test scores at the end, and the adjusted Rand index of the others where groups are found."""
    own = OWN if "method=fedpool" in ROWS[row] and row != "no own part" else 0
    shared = [f"rounds={rounds + own}", *([f"method.personal_share={own / (rounds + own)}"] if own else [])]
    words = [
        *ROWS[row], f"seed={draw}", *shared, f"participation={participation}", "device=cpu",
        "eval={every: 0, base: false}", f"checkpoint.every={rounds}", f"base.name={ASSETS / 'tiny-base'}",
    ]  # fmt: skip
    config = configfile.load(ASSETS / "quickstart.yaml", words)
    task, groups, between = federation(sizes, mixed, config.federation_seed)
    known_groups = {**groups, **dict.fromkeys(between, MIXED[1])} if row == "second oracle" else groups
    built = prepare(config, Reporter(Console(quiet=True)), task=task)
    if row in OTHERS:
        built = replace(built, method=Other(row=row, groups=known_groups))
    clients = LocalClients(built.clients, built.schedule, built.runtime)
    with TemporaryDirectory() as folder, Run(Path(folder) / "run", built.config) as made:
        made.begin()
        with patch.object(fedpool, "description_length", one_variance if row == "one variance" else two_variances):
            progress = federate(Federation(built.method, clients, built.server, built.runtime), made)
        sites, runtime, lr = built.clients, built.runtime, config.local.lr
        finish(built.method, sites, runtime, made, progress, round=built.config.rounds + 1, lr=lr)
    summary = built.evaluate(messages_for(built.method, progress.state, built.clients), "test")
    assert summary is not None
    pure = {client: group for client, group in groups.items() if client not in between}
    index = index_of(built.method.report(progress.state), pure) if isinstance(built.method, FedPool) else None
    return {"scores": summary.clients, "index": index}


def index_of(report: Mapping[str, Any], groups: Mapping[str, int]) -> float:
    """The adjusted Rand index between true groups and the most probable ones, which are one group of all clients where
    "no groups" is more probable."""
    likely = report.get("probability", 0.0) > report["no_groups"]
    group_of = {client: number for number, group in enumerate(report["groups"]) for client in group} if likely else {}
    return float(adjusted_rand_score(list(groups.values()), [group_of.get(client, -1) for client in groups]))


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    columns = ("sizes of the groups", "clients asked", "rounds", "row", "exact match", "mixed clients")
    text = ["| " + " | ".join([*columns, "adjusted Rand index", "draws"]) + " |", "|---" * 8 + "|"]
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        key = (" + ".join(map(str, line["sizes"])), line["mixed"], line["participation"], line["rounds"], line["row"])
        cells.setdefault(key, []).append(line)
    for (sizes, mixed, participation, rounds, row), of_cell in cells.items():
        scores = [list(line["scores"].values()) for line in of_cell]
        own = spread([fmean(each[: len(each) - mixed]) for each in scores])
        between = spread([fmean(each[len(each) - mixed :]) for each in scores]) if mixed else ""
        indices = ", ".join(f"{line['index']:.2f}" for line in of_cell if line["index"] is not None)
        asked = f"{participation:.0%} | {rounds}"
        text.append(f"| {sizes} | {asked} | {row} | {own} | {between} | {indices} | {len(of_cell)} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 4, 4], help="clients in each group")
    parser.add_argument("--mixed", type=int, default=0, help="clients between the first and the third group")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=["oracle", "fedpool"])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--participation", type=float, default=1.0)
    parser.add_argument("--table", action="store_true", help="train nothing")
    asked = parser.parse_args()
    with plain_errors(parser):
        if min(asked.sizes) < 1:
            raise UserError(f"--sizes is {asked.sizes}; each group needs a client")
        if asked.mixed < 0 or asked.mixed and len(asked.sizes) < 3:
            raise UserError(f"--mixed is {asked.mixed} with {len(asked.sizes)} groups; it needs three groups")
        file = asked.out / "planted.jsonl"
        lines = read_records(file)
        if any("mixed" not in line for line in lines):
            raise UserError(f"{file} is of an earlier version, without the own part; give another OUT")
        made = {"sizes": asked.sizes, "mixed": asked.mixed}
        made |= {"participation": asked.participation, "rounds": asked.rounds}
        for draw in [] if asked.table else range(asked.draws):
            for row in asked.rows:
                line = {"draw": draw, "row": row, **made}
                if any(line.items() <= known.items() for known in lines):
                    continue
                line |= run(row, asked.sizes, asked.participation, asked.rounds, draw, asked.mixed)
                lines.append(line)
                asked.out.mkdir(parents=True, exist_ok=True)
                with file.open("a") as opened:
                    opened.write(json.dumps(line) + "\n")
                print(draw, row, f"{fmean(line['scores'].values()):.1f}", line["index"], flush=True)
        print(table(lines))


if __name__ == "__main__":
    with lasting_streams():
        main()
