"""Runs with very many clients, on a base so small that what is measured is all the rest: start, a round, scoring and
handing out, in CPU seconds of one thread; peak memory and disk.

python scripts/bench/many_clients.py --out FOLDER --clients 100 1000 10000 100000 [--methods fedit local]
python scripts/bench/many_clients.py --out FOLDER --show [--plot docs/images/many_clients.png]

Each run is a process of its own and becomes a line of FOLDER/measured.jsonl; the same command goes on after those that
are there. 100 clients are asked in each round, and each has three examples to train and one to be tested on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from llm_fed import methods
from llm_fed.basics import signs
from llm_fed.eval.style import MARKERS, plain_axes, save
from llm_fed.experiment import run as experiment
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.testing import tiny

EXAMPLES = 4  # of each client
ASKED = 100
IN_ROUNDS = ("broadcast", "local", "collect", "server", "checkpoint")
CURVES = {"start": "start", "round": "a round", "scoring": "scoring all", "export": "handing out to all"}
PARTS = {"test": "scoring", "writing the personal models": "export", "writing the report": "report"}


class Timed(Reporter):
    """Says nothing, and takes the CPU time of each part of a run."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__(Console(quiet=True))
        self.began, self.start = time.process_time(), 0.0
        self.rounds: list[float] = []
        self._stop_after = stop_after
        self.parts: dict[str, list[float]] = defaultdict(list)
        self._open: dict[str, float] = {}

    def round(self, number: int) -> None:
        self._open["round"] = time.process_time()
        self.start = self.start or self._open["round"] - self.began

    def round_ended(self) -> None:
        self.rounds.append(time.process_time() - self._open["round"])
        if len(self.rounds) == self._stop_after:
            raise KeyboardInterrupt

    def begin(self, part: str) -> None:
        self._open[part] = time.process_time()

    def end(self, part: str) -> None:
        self.parts[part].append(time.process_time() - self._open.pop(part))


def rows(client: int) -> Iterator[dict[str, str]]:
    """Of one client: it answers words with two words of its own."""
    for place in range(EXAMPLES):
        prompt = f"w{2 + (client + place) % 20} w{22 + place}"
        yield {"question": prompt, "answer": f"w{30 + client % 15} w{45 + client % 15}"}


def write_data(folder: Path, clients: int) -> Path:
    """A file with a client column, written where it is not there yet."""
    path, partial = folder / f"data-{clients}.jsonl", folder / "partial"
    if path.exists():
        return path
    table = [{"client": f"client{number:06d}", **row} for number in range(clients) for row in rows(number)]
    partial.write_text("".join(json.dumps(row) + "\n" for row in table))
    return partial.rename(path)


def write_base(folder: Path) -> Path:
    """Two layers of width 24 and a vocabulary of 61 words."""
    path = folder / "base"
    if not path.exists():
        tiny.drawn(tiny.llama, 0).save_pretrained(path)
        tiny.tokenizer(**tiny.SPECIAL).save_pretrained(path)
    return path


def measured(
    folder: Path, method: str, clients: int, rounds: int, only_rounds: bool, more: list[str]
) -> dict[str, Any]:
    """A whole run in this process, or its rounds."""
    run = folder / f"run-{method}-{clients}"
    experiment.quiet()
    config = configfile.load({}, [
        "task.name=files", f"task.path={write_data(folder, clients)}", f"base.name={write_base(folder)}",
        f"method={method}", f"rounds={rounds}", f"participation={min(1.0, ASKED / clients)}", "device=cpu",
        "adapter.rank=1", "adapter.target_modules=[q_proj, v_proj]", "task.template=plain", "task.max_length=32",
        "task.validation=0", "local.steps=2", "local.batch_size=2", "eval.metric=exact_match", "eval.max_new_tokens=2",
        "eval.select=last", "report.samples=0", *more,
    ])  # fmt: skip
    timed, began = Timed(rounds - 1 if only_rounds else None), time.perf_counter()
    signs.listener.set(timed)
    with suppress(KeyboardInterrupt):
        experiment.train(config, run, fresh=True, reporter=timed)
    line = {
        "method": method, "clients": clients, "start": timed.start,
        "round": statistics.median(timed.rounds[1:-1]), "whole": time.process_time() - timed.began,
        "wall": time.perf_counter() - began,
        "parts": {part: statistics.median(timed.parts[part][1:-1]) for part in IN_ROUNDS},
        **({} if only_rounds else {name: sum(timed.parts[part]) for part, name in PARTS.items()}),
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "disk": sum(path.stat().st_blocks * 512 for path in run.rglob("*")) / 2**30,
    }  # fmt: skip
    shutil.rmtree(run)
    return line


def show(lines: list[dict[str, Any]]) -> None:
    print(
        "| method | clients | start, s | a round, s | scoring, ms each | export, ms each | report, s | "
        "memory, GiB | disk, GiB |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    for line in lines:
        each = [f"{1000 * line[part] / line['clients']:.2f}" if part in line else "" for part in ("scoring", "export")]
        report = f"{line['report']:.1f}" if "report" in line else ""
        print(
            f"| {line['method']} | {line['clients']:,} | {line['start']:.1f} | {line['round']:.3f} | "
            f"{' | '.join(each)} | {report} | {line['memory']:.2f} | {line['disk']:.3f} |"
        )


def plot(lines: list[dict[str, Any]], path: Path) -> Path:
    """CPU seconds of one method's runs by the number of clients, and their memory."""
    figure = Figure(figsize=(6.4, 2.8), layout="constrained")
    times, memory = (plain_axes(figure, (1, 2, place)) for place in (1, 2))
    for (part, label), marker in zip(CURVES.items(), MARKERS, strict=False):
        points = sorted((line["clients"], line[part]) for line in lines if part in line)
        times.loglog(*zip(*points, strict=True), marker=marker, label=label)
    points = sorted((line["clients"], line["memory"]) for line in lines)
    memory.semilogx(*zip(*points, strict=True), marker="o")
    memory.set_ylim(0)
    for axes, title in ((times, "CPU seconds"), (memory, "peak memory, GiB")):
        axes.set_title(title)
        axes.set_xlabel("registered clients")
    times.legend(frameon=False, fontsize=8)
    return save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the data, the base and the results")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--methods", nargs="+", default=["fedit"], choices=methods.METHODS, metavar="METHOD")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-rounds", action="store_true", help="stop before any client is scored")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of the runs")
    parser.add_argument("--show", action="store_true", help="print the results, and run nothing")
    parser.add_argument("--plot", type=Path, help="draw the results of the first method into this file")
    parser.add_argument("--here", action="store_true", help="do one run in this process, and print its result")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "measured.jsonl"
    if given.here:
        (method,), (clients,) = given.methods, given.clients
        line = measured(given.out, method, clients, given.rounds, given.only_rounds, given.set)
        print(json.dumps(line))
        return
    done = read_records(results)
    known = {(line["method"], line["clients"], "export" not in line) for line in done}
    for clients in given.clients:
        for method in given.methods:
            if given.show or (method, clients, given.only_rounds) in known:
                continue
            words = [
                sys.executable, __file__, "--here", "--out", str(given.out), "--clients", str(clients), "--methods",
                method, "--rounds", str(given.rounds),
                *(["--only-rounds"] if given.only_rounds else []), "--set", *given.set,
            ]  # fmt: skip
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            line = json.loads(
                subprocess.run(words, check=True, stdout=subprocess.PIPE, env=environment).stdout.splitlines()[-1]
            )
            with open(results, "a") as file:
                file.write(json.dumps(line) + "\n")
            done.append(line)
            show([line])
    show(done)
    if given.plot:
        plot([line for line in done if line["method"] == given.methods[0]], given.plot)


if __name__ == "__main__":
    main()
