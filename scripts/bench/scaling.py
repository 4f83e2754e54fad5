"""Strong scaling over the ranks of a launch: local training of one cohort, and its validation, on 1, 2, ... ranks.

The numbers of ranks take turns. Seconds are medians over rounds and repeats, without the first round of each start.
CPU seconds are those of the busiest rank's share of the work, which other load on the machine disturbs less than wall
seconds; "beside it" are rank 0's for coroutines, packing and messages.

    OMP_NUM_THREADS=1 python scripts/bench/scaling.py scripts/runs/flan_cpu.yaml base.name=BASE task.path=FLAN \\
        device=cpu eval.limit=8
    python scripts/bench/scaling.py scripts/runs/flan.yaml --processes 1 2 4 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from llm_fed.bench.build import prepare
from llm_fed.experiment import run
from llm_fed.method.requests import Executor, Fit, Request, Work
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.accelerate import DistributedEngine, Shared, serve_orders
from llm_fed.runtime.launch import connect, other_ranks
from llm_fed.runtime.local import LocalRuntime
from llm_fed.settings import configfile
from llm_fed.settings.config import Config

PARTS = ("train", "validate")
Measured = dict[int, dict[str, Any]]  # by rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("settings", nargs="*", help="key=value settings that override the file")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rank-of-a-launch", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.rank_of_a_launch:
        take_part(given)
        return
    results: dict[int, list[Measured]] = {size: [] for size in given.processes}
    for _ in range(given.repeats):
        for size in given.processes:
            results[size].append(measured(size))
    report(results)


def measured(size: int) -> Measured:
    """What `take_part` prints in so many processes."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(size)]
    done = subprocess.run([*launcher, *sys.argv, "--rank-of-a-launch"], stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    return {line.pop("rank"): line for line in lines}


class Timed:
    """An engine that notes the CPU seconds of each call."""

    def __init__(self, engine: Executor):
        self._engine = engine
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def execute(self, requests: Sequence[Request[Any]]) -> Sequence[Any]:
        start = time.process_time()
        results = self._engine.execute(requests)
        self.seconds["train" if isinstance(requests[0], Fit) else "validate"] += time.process_time() - start
        return results

    def take_work(self) -> Work:
        return self._engine.take_work()


def take_part(given: argparse.Namespace) -> None:
    """Measure, as rank 0; or serve. One more round than asked for: in the first all is slower."""
    run.quiet()
    channel = connect()
    timed: list[Timed] = []

    def timing(shared: Shared) -> Shared:
        timed[:] = [Timed(shared.engine)]
        return replace(shared, engine=timed[0])

    if channel and channel.rank:
        build = run.builder()
        serve_orders(lambda config, known: timing(build(config, known)))
        share = {part: seconds / (given.rounds + 1) for part, seconds in timed[0].seconds.items()}
        say({"rank": channel.rank, "share": share})
        return
    config: Config = configfile.load(given.config, given.settings)
    prepared = prepare(config, Reporter(Console(quiet=True)))
    shared = timing(prepared.shared())
    ranks = other_ranks()
    engine = DistributedEngine(ranks, config, shared) if ranks else shared.engine
    runtime = LocalRuntime(engine, prepared.runtime.clients_per_pass)
    wall: dict[str, list[float]] = {part: [] for part in PARTS}
    before = time.process_time()
    for round in range(given.rounds + 1):
        sites = list(prepared.clients.values())[: prepared.schedule.cohort_size]
        for site in sites:
            site.begin(round, config.local.lr)
        start = time.perf_counter()
        trained = runtime.run({site.id: site.fit(site.initial()) for site in sites})
        middle = time.perf_counter()

        async def personal(site: Any, states: Any = trained) -> Any:
            return states.get(site.id) or site.initial()

        prepared.score(personal, "validation")
        wall["train"].append(middle - start)
        wall["validate"].append(time.perf_counter() - middle)
    beside = time.process_time() - before - sum(timed[0].seconds.values())
    if ranks:
        ranks.__exit__()
    share = {part: seconds / (given.rounds + 1) for part, seconds in timed[0].seconds.items()}
    wall = {part: seconds[1:] for part, seconds in wall.items()}
    say({"rank": 0, "share": share, "wall": wall, "beside": beside / (given.rounds + 1)})


def say(record: dict[str, Any]) -> None:
    """In one piece, as several ranks have the same standard output."""
    sys.stdout.write(json.dumps(record) + "\n")


def report(results: dict[int, list[Measured]]) -> None:
    """A table on standard output."""
    print("| part | processes | wall s per round | speed-up | CPU s of the busiest rank | speed-up | CPU s beside it |")
    print("|---|---|---|---|---|---|---|")
    for part in PARTS:
        first: tuple[float, float] | None = None
        for size, repeats in results.items():
            wall = statistics.median(seconds for ranks in repeats for seconds in ranks[0]["wall"][part])
            busiest = statistics.median(max(rank["share"][part] for rank in ranks.values()) for ranks in repeats)
            beside = statistics.median(ranks[0]["beside"] for ranks in repeats)
            first = first or (wall, busiest)
            if not busiest:  # a task without validation examples
                continue
            print(
                f"| {part} | {size} | {wall:.2f} | {first[0] / wall:.2f} | {busiest:.2f} | {first[1] / busiest:.2f} | "
                f"{beside:.3f} (both parts) |"
            )


if __name__ == "__main__":
    main()
