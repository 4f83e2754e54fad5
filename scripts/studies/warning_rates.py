"""How often a run warns where nothing is wrong, and where a client was put into the wrong group.

Each draw is a federation of planted groups (`tasks/synthetic.py`) with its own rules, examples and training seed. Its
clients train alone (`local`), with the clients of their own group (`right`), and with one client in another group
(`wrong`). Nobody finds groups: they are given, so that it is known what is wrong. In `right`, every warning is false;
of `local` a warning that another client's model is better is true, as a client of the same group may have better
examples. In `wrong`, a warning about the client that was moved is a hit.

    python scripts/studies/warning_rates.py --draws 20 --out runs/analysis/warning_rates.jsonl

The file holds a line per run; the same command goes on after the last one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from llm_fed.basics.files import append_file
from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.bases import Bases
from llm_fed.commands.quickstart import ASSETS
from llm_fed.eval.scripting import plain_errors
from llm_fed.eval.warning import KINDS
from llm_fed.experiment import finish, run
from llm_fed.merge import mean
from llm_fed.method import Message, Method, Server, State, Upload
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import TaskConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks import Task
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.synthetic import METRIC, planted

GROUPS = {f"zoo-{number}": number // 3 for number in range(6)}
TRAITS = ("colour", "kind")
MOVED = "zoo-2"  # of the first group; in `wrong` it trains with the second
ROWS = ("local", "right", "wrong")


def load(config: TaskConfig, seed: int) -> TaskData:
    return planted(GROUPS, TRAITS, seed)


TASK = Task(load, metric=METRIC, clients="6 in 2 groups", source="synthetic")


@dataclass(frozen=True)
class Assigned(Method):
    """Federated averaging within groups that are given."""

    paper: ClassVar[str] = ""
    groups: tuple[int, ...] = tuple(GROUPS.values())  # of each client in the order of their names

    def init(self, server: Server) -> Message:
        return {str(group): server.initial() for group in sorted({*self.groups})}

    def _of(self, client: str) -> str:
        return str(self.groups[list(GROUPS).index(client)])

    def broadcast(self, state: Message, client: str) -> Message:
        return state[self._of(client)]

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        moved: dict[str, State] = dict(state)
        for group in state:
            own = [upload for upload in uploads if self._of(upload.client) == group]
            if own:
                moved[group] = state[group] + mean([upload.content for upload in own])
        return moved


def configuration(row: str, draw: int, rounds: int) -> dict[str, Any]:
    groups = GROUPS | ({MOVED: 1} if row == "wrong" else {})
    method: Mapping[str, Any] = {"name": f"{Path(__file__).stem}:Assigned", "groups": list(groups.values())}
    return {
        "seed": draw,
        "rounds": rounds,
        "base": {"name": str(ASSETS / "tiny-base"), "dtype": "float32"},
        "adapter": {"rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
        "task": {"name": f"{Path(__file__).stem}:TASK", "max_length": 64, "template": "alpaca-short"},
        "method": {"name": "local"} if row == "local" else method,
        "local": {"steps": 3, "batch_size": 8, "lr": 1.0e-2, "lr_end": 1.0e-3},
        "eval": {"every": 0, "batch_size": 128, "max_new_tokens": 4, "base": "auto"},
        "checkpoint": {"every": rounds},
        "report": {"samples": 0},
        "export": {"clients": "none"},
        "device": "cpu",
    }


def train(draw: int, rounds: int, bases: Bases) -> list[dict[str, Any]]:
    lines = []
    with TemporaryDirectory() as folder:
        for row in ROWS:
            config, began = from_dict(configuration(row, draw, rounds)), time.perf_counter()
            quiet = Reporter(Console(quiet=True))
            done = run.train(config, Path(folder) / row, reporter=quiet, base=bases.of(config))
            warnings = [{key: warned[key] for key in ("kind", "clients", "text")} for warned in done["warnings"]]
            seconds, mean = round(time.perf_counter() - began, 1), round(done["scores"]["mean"], 2)
            lines.append({"draw": draw, "row": row, "mean": mean, "seconds": seconds, "warnings": warnings})
    return lines


def rates(lines: list[dict[str, Any]]) -> Table:
    """How many runs of each row warn of a kind; in `wrong` about the client that was moved, and about others."""
    table = Table("warning", "local", "right (false)", "wrong: the moved client (hit)", "wrong: others")
    by_row = {row: [line["warnings"] for line in lines if line["row"] == row] for row in ROWS}

    def count(row: str, kinds: set[str], of: tuple[bool, ...] = (True, False)) -> str:
        found = [
            any(warned["kind"] in kinds and any((client == MOVED) in of for client in warned["clients"])
                for warned in warnings)
            for warnings in by_row[row]
        ]  # fmt: skip
        return f"{sum(found)} of {len(found)}"

    for name, kinds in {**{kind: {kind} for kind in KINDS}, "any": set(KINDS)}.items():
        wrong = count("wrong", kinds, (True,)), count("wrong", kinds, (False,))
        table.add_row(name, count("local", kinds), count("right", kinds), *wrong)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs/analysis/warning_rates.jsonl"))
    asked = parser.parse_args()
    run.quiet()
    finish.write_report = lambda folder: None  # type: ignore[assignment]  # takes longer than the training
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    bases = Bases()
    with plain_errors(parser):
        done = {line["draw"] for line in read_records(asked.out)}
        for draw in range(asked.draws):
            if draw not in done:
                lines = train(draw, asked.rounds, bases)
                append_file(asked.out, "".join(json.dumps(line) + "\n" for line in lines).encode())
                print(f"draw {draw}: " + ", ".join(f"{line['row']} {line['mean']}" for line in lines), flush=True)
        Console(width=120).print(rates(read_records(asked.out)))


if __name__ == "__main__":
    with lasting_streams():
        main()
