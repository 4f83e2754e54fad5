"""What CA2FL's cache, one row per client, costs in RAM, on disk and in time, with and without a limit on its RAM.

Random updates without training: every client answers `--passes` times, `--cohort` of them in each round, and each round
ends with a checkpoint. Each limit has a process of its own. On disk it needs up to clients x parameters x 4 bytes, and
a few rounds more.

python scripts/bench/ca2fl_cache.py
python scripts/bench/ca2fl_cache.py --clients 64 --cohort 8 --parameters 11_200_000   # like a ResNet-18
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from llm_fed.method import Upload
from llm_fed.method.server import Server
from llm_fed.methods.ca2fl import CA2FL
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.rows import Memory
from llm_fed.settings.config import LocalConfig
from llm_fed.state import Layout, State


@dataclass
class Measured:
    """Lists have one number per round."""

    imported: int  # bytes of the process before the first round
    resident: int = 0  # bytes of the process, at the end
    on_disk: int = 0  # bytes in the checkpoints' folder, at the end
    written: list[int] = field(default_factory=list)  # bytes
    step: list[float] = field(default_factory=list)  # seconds
    save: list[float] = field(default_factory=list)  # seconds


def measure(given: argparse.Namespace, limit: float, folder: Path) -> Measured:
    """All rounds with at most `limit` bytes of rows in RAM."""
    torch.set_num_threads(1)
    layout = Layout(("weight",), ((given.parameters,),))
    names = tuple(f"c{i}" for i in range(given.clients))
    server = Server("server", None, LocalConfig(), 0, lambda draws: State(layout, torch.zeros(layout.size)))  # type: ignore[arg-type]
    checkpoints = Checkpoints(folder, limit)
    server.clients, server.memory = names, Memory(checkpoints.store)
    method, process = CA2FL(buffer=given.buffer), psutil.Process()
    state, measured = method.init(server), Measured(process.memory_info().rss)
    for number in range(given.passes * math.ceil(given.clients / given.cohort)):
        at = number * given.cohort % given.clients
        deltas = {name: State(layout, torch.randn(layout.size)) for name in names[at : at + given.cohort]}
        uploads = [Upload(name, 1, 0, delta) for name, delta in deltas.items()]
        server.begin(number + 1, 0.1)
        before, start = process.io_counters().write_chars, time.perf_counter()
        state = asyncio.run(method.server_update(server, state, uploads))
        stepped = time.perf_counter()
        checkpoints.save(number + 1, state, {"server": server.memory.rows})
        checkpoints.prune(lambda round, last=number + 1: round >= last - 1)  # type: ignore[misc]
        measured.step.append(stepped - start)
        measured.save.append(time.perf_counter() - stepped)
        measured.written.append(process.io_counters().write_chars - before)
    measured.resident = process.memory_info().rss
    measured.on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50, help="clients that answer in a round")
    parser.add_argument("--parameters", type=int, default=47_818, help="P, the parameters of one update (float32)")
    parser.add_argument("--buffer", type=int, default=10, help="updates per server step")
    parser.add_argument("--passes", type=int, default=2, help="how often each client answers")
    parser.add_argument("--share", type=float, default=0.1, help="RAM limit, as a share of all clients' rows")
    given = parser.parse_args()

    rows = given.clients * given.parameters * 4
    print(f"{given.clients} clients, {given.cohort} a round, P = {given.parameters:,}: rows of {rows / 1e6:,.0f} MB\n")
    print("| limit | process, MB (at the start) | on disk, MB | written a round, MB | server step, s | checkpoint, s |")
    print("|---|---|---|---|---|---|")
    for limit in (math.inf, given.share * rows):
        with TemporaryDirectory() as folder, ProcessPoolExecutor(1, get_context("spawn")) as pool:
            measured = pool.submit(measure, given, limit, Path(folder)).result()
        once = math.ceil(given.clients / given.cohort)  # rounds until everybody has a row; later ones read it
        columns = [
            "none" if limit == math.inf else f"{limit / 1e6:,.0f} MB",
            f"{measured.resident / 1e6:,.0f} ({measured.imported / 1e6:,.0f})",
            f"{measured.on_disk / 1e6:,.0f}", f"{statistics.median(measured.written) / 1e6:,.1f}",
            *(f"{statistics.median(part[:once]):.3f}, then {statistics.median(part[once:] or part):.3f}"
              for part in (measured.step, measured.save)),
        ]  # fmt: skip
        print(f"| {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
