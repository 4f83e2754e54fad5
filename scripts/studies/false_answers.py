"""One of twelve clients with pictures sends numbers that no honest client has: what the eleven others get.

    OMP_NUM_THREADS=1 nice -n 10 python scripts/studies/false_answers.py --path femnist.npz \
        --out runs/analysis/false_answers.jsonl

The clients are twelve writers of FEMNIST, who train a ResNet-9 in one process. The last one trains like the others, and
what it sends is changed on its way, in every round; as the case `refused` nothing of it arrives. Each false answer is
tried twice: as the server checks answers, `checked`, and with the checks of version 0.3.0, which knew the form of an
answer and the norms of its parts, but no roles, `norms alone`. The file holds a line per run, and the same command goes
on after what is there. `--table` trains nothing and prints the mean test accuracy of the honest clients.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.build import prepare
from llm_fed.eval.scripting import plain_errors, spread
from llm_fed.federation.clients import LocalClients, messages_for
from llm_fed.federation.loop import Federation, federate
from llm_fed.federation.progress import Progress
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.state import State
from llm_fed.state.roles import is_variance
from llm_fed.state.wire import pack

CLIENTS = 12
CHECKS = ("checked", "norms alone")
Change = Callable[[Any], Any]  # of an upload


def honest(upload: Any) -> Any:
    return upload


def turned(counts: int | None) -> Change:
    """Prototypes with the sign turned, with such a count of each class (None: the client's own counts)."""

    def change(upload: Any) -> Any:
        own = upload["counts"]
        return {
            "prototypes": -upload["prototypes"],
            "counts": own if counts is None else torch.full_like(own, counts),
        }

    return change


def statistics(value: float, which: Callable[[str], bool] = lambda name: True) -> Change:
    """An update whose running statistics of these names are all `value`; its weights are real."""

    def change(upload: State) -> State:
        extras = {
            name: torch.full_like(buffer, value) if buffer.is_floating_point() and which(name) else buffer
            for name, buffer in upload.extras.items()
        }
        return State(upload.layout, upload.row, extras)

    return change


@dataclass(frozen=True)
class Case:
    """What the hostile client does; `examples` is by how much it multiplies its number of examples."""

    change: Change | None  # None: nothing of it arrives
    examples: int = 1


COMMON = {"none": Case(honest), "refused": Case(None)}
OF_STATISTICS = COMMON | {
    "statistics of 3.4e38": Case(statistics(3.4e38)),
    "variances of -1000": Case(statistics(-1000.0, is_variance)),
}
WEIGHTED = OF_STATISTICS | {
    "statistics of 3.4e38, ten times its examples": Case(statistics(3.4e38), 10),
    "ten times its examples": Case(honest, 10),
}
CASES: dict[str, dict[str, Case]] = {
    "fedproto": COMMON | {
        "turned prototypes": Case(turned(None)),
        "turned prototypes, counts of 10^9": Case(turned(10**9)),
        "turned prototypes, counts of -10^6": Case(turned(-(10**6))),
    },
    "fedit": WEIGHTED,
    "fedit, geometric-median": WEIGHTED,
    "fedbuff": OF_STATISTICS,
}  # fmt: skip
WORDS = {
    "fedproto": ["method={name: fedproto, classifier: prototypes}"],
    "fedit": ["method={name: fedit}"],
    "fedit, geometric-median": ["method={name: fedit}", "server={aggregation: geometric-median}"],
    "fedbuff": [f"method={{name: fedbuff, buffer: {CLIENTS}}}"],
}


class OneHostile(LocalClients):
    """Clients of whom one changes what it sends."""

    def __init__(self, hostile: str, case: Case, *args: Any):
        super().__init__(*args)
        self._hostile, self._case = hostile, case

    def exchange(self, method: Any, progress: Progress, lr: float, run: Run, watch: Any) -> dict[str, Any]:
        record = super().exchange(method, progress, lr, run, watch)
        arriving = []
        for item in progress.in_flight:
            if item.client != self._hostile or item.asked != progress.round:
                arriving.append(item)
            elif self._case.change is not None:
                false = run.checkpoints.store.row(pack(self._case.change(item.content.message())))
                examples = item.num_examples * self._case.examples
                arriving.append(replace(item, content=false, num_examples=examples))
        progress.in_flight = arriving
        return record


@contextmanager
def norms_alone() -> Iterator[None]:
    """The checks of version 0.3.0: the form of an upload, finite numbers, and norms."""
    with (
        mock.patch("llm_fed.federation.uploads.own_flaw", lambda *given: ""),
        mock.patch("llm_fed.federation.bounds._running", lambda *given: {}),
        mock.patch("llm_fed.federation.bounds._rows", lambda *given: {}),
    ):
        yield


def run(method: str, case: str, checks: str, draw: int, rounds: int, path: Path) -> dict[str, Any]:
    """What came of one run: the test accuracy of each honest client and how many uploads were refused, or the round in
    which the run ended."""
    words = [*WORDS[method], f"seed={draw}", f"rounds={rounds}", "device=cpu", "adapter=null",
             "base={name: resnet-9, dtype: float32}", "eval={every: 0}", f"checkpoint.every={rounds}",
             f"task={{name: femnist, path: {json.dumps(str(path))}, clients: {CLIENTS}, validation: 0.0}}",
             "local={steps: null, epochs: 1, batch_size: 32, lr: 0.003, lr_end: 0.003, optimizer: adam}"]  # fmt: skip
    built = prepare(configfile.load({}, words), Reporter(Console(quiet=True)))
    hostile = list(built.clients)[-1]
    guard = norms_alone() if checks == "norms alone" else nullcontext()
    with TemporaryDirectory() as folder, Run(Path(folder) / "run", built.config) as made, guard:
        made.begin()
        clients = OneHostile(hostile, CASES[method][case], built.clients, built.schedule, built.runtime)
        try:
            progress = federate(Federation(built.method, clients, built.server, built.runtime), made)
            summary = built.evaluate(messages_for(built.method, progress.state, built.clients), "test")
        except RunError as error:
            return {"ended": str(error)}
        lines = read_records(made.folder / "metrics.jsonl")
    assert summary is not None
    refused = sum(line["refused"] for line in lines if line["kind"] == "round")
    return {
        "refused": refused,
        "scores": {name: score for name, score in summary.clients.items() if name != hostile},
    }


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A row for each method and case: the honest clients' mean accuracy under either kind of checks."""
    cells: dict[tuple[str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for line in lines:
        cells.setdefault((line["method"], line["case"]), {}).setdefault(line["checks"], []).append(line)
    text = [f"| method | one of {CLIENTS} | draws | {' | '.join(CHECKS)} |", "|---|---|---:|---|---|"]
    for method, case in ((method, case) for method, cases in CASES.items() for case in cases):
        if by_checks := cells.get((method, case)):
            draws = max(map(len, by_checks.values()))
            row = [_cell(by_checks.get(checks, [])) for checks in CHECKS]
            text.append(f"| `{method}` | {case} | {draws} | {' | '.join(row)} |")
    return "\n".join(text)


def _cell(lines: Sequence[Mapping[str, Any]]) -> str:
    means = [fmean(line["scores"].values()) for line in lines if "scores" in line]
    said = [spread(means)] if means else []
    if ended := len(lines) - len(means):
        said.append(f"{ended} of {len(lines)} runs end with an error")
    if refused := sum(line.get("refused", 0) for line in lines):
        said.append(f"{refused} answers refused")
    return "; ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="FEMNIST, as task.path")
    parser.add_argument("--methods", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/false_answers.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the table of finished runs")
    asked = parser.parse_args()
    with plain_errors(parser):
        lines = read_records(asked.out)
        if other := [line for line in lines if line["rounds"] != asked.rounds]:
            raise UserError(f"{asked.out} has runs of {other[0]['rounds']} rounds; give another --out")
        if not asked.table:
            asked.out.parent.mkdir(parents=True, exist_ok=True)
            keys = ("draw", "method", "case", "checks")
            done = {tuple(line[key] for key in keys) for line in lines}
            cells = ((draw, method, case, checks) for draw, method in product(range(asked.draws), asked.methods)
                     for case, checks in product(CASES[method], CHECKS))  # fmt: skip
            for draw, method, case, checks in cells:
                if (draw, method, case, checks) in done or (case in COMMON and checks != CHECKS[0]):
                    continue
                outcome = run(method, case, checks, draw, asked.rounds, asked.path)
                lines.append({"draw": draw, "method": method, "case": case, "checks": checks} | outcome)
                lines[-1]["rounds"] = asked.rounds
                with asked.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print(draw, method, case, checks, _cell(lines[-1:]), flush=True)
        print(table([line for line in lines if line["draw"] < asked.draws]))


if __name__ == "__main__":
    with lasting_streams():
        main()
