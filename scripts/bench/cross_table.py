"""Seconds of the cross table for 5, 8 and 100 clients, beside those of the test, with the tiny base that is shipped.

The clients are those of `tasks/synthetic.py` with 64 test examples each, and their models are untrained adapters, which
answer as slowly as trained ones.

    python scripts/bench/cross_table.py --clients 5 8 100
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from llm_fed.basics.terminal import lasting_streams
from llm_fed.bench.build import Experiment, prepare
from llm_fed.commands.quickstart import ASSETS
from llm_fed.experiment import cross, run
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks.synthetic import planted


def built(clients: int, every: bool, limit: int | None) -> Experiment:
    tree: dict[str, Any] = {
        "base": {"name": str(ASSETS / "tiny-base"), "dtype": "float32"},
        "task": {"name": "planted", "max_length": 64},
        "method": {"name": "local"},
        "eval": {"batch_size": 128, "max_new_tokens": 4, "cross": True if every else "auto", "limit": limit},
        "device": "cpu",
    }
    task = planted({f"zoo-{number:03d}": number % 2 for number in range(clients)}, ("colour", "kind"), 0)
    return prepare(from_dict(tree), Reporter(Console(quiet=True)), task=task)


def row(clients: int, every: bool, limit: int | None) -> list[str]:
    """Clients, models, answers and seconds of the table, and answers and seconds of the test."""
    experiment = built(clients, every, limit)
    states = {id: site.initial() for id, site in experiment.scored.items()}
    began = time.perf_counter()
    summary = experiment.score_states(states, "test", each=True)
    assert summary is not None
    tested = time.perf_counter()
    plan = cross.planned(experiment)
    cross.scored(experiment, plan, states, summary.examples, {})
    ended = time.perf_counter()
    answers = sum(map(len, summary.examples.values()))
    setting = "true" + (f", eval.limit={limit}" if limit else "") if every else "auto"
    return [str(clients), setting, str(len(plan.clients)), f"{plan.answers:,}", f"{ended - tested:.1f}",
            f"{answers:,}", f"{tested - began:.1f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 8, 100])
    asked = parser.parse_args()
    run.quiet()
    table = Table("clients", "eval.cross", "models", "answers", "seconds", "test: answers", "test: seconds")
    for clients in asked.clients:
        table.add_row(*row(clients, False, None))
    table.add_row(*row(max(asked.clients), True, 2))
    Console(width=120).print(table)


if __name__ == "__main__":
    with lasting_streams():
        main()
