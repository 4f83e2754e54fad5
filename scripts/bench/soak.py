"""A long run of tiny rounds with late and lost answers, stopped and continued again and again in one process: memory,
open files and checkpoints must not grow.

python scripts/bench/soak.py [--rounds 2000] [--restart 50] [--method fedbuff]

What is measured after the first restarts is compared with the end; a difference of more than 5 % is a failure. Of a run
folder only metrics.jsonl and timing.jsonl grow, by their lines of each round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from llm_fed.commands.quickstart import ASSETS
from llm_fed.experiment import run as experiment
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile

SLACK = 0.05
WARM = 4  # restarts until all is loaded, and allocators have what they keep
ROW = "| {:>6} | {:>8.1f} | {:>8.1f} | {:>5} | {:>10.1f} | {:>5} | {:>10.2f} | {:>12.1f} |"


class Stopper(Reporter):
    """Says nothing, and ends the process, as far as the run can tell, in the middle of a round."""

    def __init__(self, after: int):
        super().__init__(Console(quiet=True))
        self._after = after

    def record(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "round" and record["round"] > self._after:
            raise KeyboardInterrupt


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 gives, in bytes; `fordblks` are free in the heaps of all threads."""

    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def _kept_by_malloc() -> int:
    """Bytes that were freed and that the C library keeps all the same, after it was asked to give back what it can; 0
    where it does not say."""
    library = ctypes.CDLL(None)
    with suppress(AttributeError):  # only glibc has these
        library.malloc_trim(0)
        library.mallinfo2.restype = _Mallinfo
        return int(library.mallinfo2().fordblks)
    return 0


def measured(folder: Path) -> dict[str, float]:
    """Memory in MiB, open files, and what the run folder holds, in kiB and files. `memory` is without what a C library
    keeps, which grows with what a run has read of its lines until it levels off."""
    gc.collect()
    kept_by_malloc = _kept_by_malloc()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    kept = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    lines = [folder / "metrics.jsonl", folder / "timing.jsonl"]
    return {
        "resident": resident / 2**20,
        "memory": (resident - kept_by_malloc) / 2**20,
        "open": len(os.listdir("/proc/self/fd")),
        "checkpoints": sum(path.stat().st_size for path in kept) / 2**10,
        "files": len(kept),
        "lines": sum(path.stat().st_size for path in lines) / 2**20,
    }


def _row(round: int, now: Mapping[str, float], spent: float) -> str:
    whole = (int(now[what]) for what in ("open", "files"))
    return ROW.format(
        round, now["resident"], now["memory"], next(whole), now["checkpoints"], next(whole), now["lines"], spent
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--restart", type=int, default=50, help="rounds between two stops")
    parser.add_argument("--method", default="fedbuff")
    given = parser.parse_args()
    experiment.quiet()
    words = [
        f"base.name={ASSETS / 'tiny-base'}", f"method={given.method}", f"rounds={given.rounds}", "participation=0.25",
        "local.steps=1", "local.batch_size=2", "adapter.rank=1", "delay.sigma=1.5", "delay.drop_out=0.2",
        "eval.every=100", "eval.limit=1", "eval.base=false", "checkpoint.every=1", "checkpoint.keep=2",
    ]  # fmt: skip
    config = configfile.load(ASSETS / "quickstart.yaml", words)
    print(f"{given.method}, {given.rounds} rounds, stopped every {given.restart}; command: {' '.join(sys.argv)}\n")
    heads = "rounds", "resident, MiB", "in use, MiB", "open files", "checkpoints, KiB", "in files", "lines, MiB"
    print(f"| {' | '.join(heads)} | ms per round |")
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    seen = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "run"
        for after in range(given.restart, given.rounds, given.restart):
            started = time.monotonic()
            with suppress(KeyboardInterrupt):
                experiment.train(config, folder, reporter=Stopper(after))
            seen.append(measured(folder))
            spent = 1000 * (time.monotonic() - started) / given.restart
            if len(seen) <= WARM or len(seen) % 4 == 0 or after + given.restart >= given.rounds:
                print(_row(after, seen[-1], spent), flush=True)
    if len(seen) <= 2 * WARM:
        sys.exit("too few restarts to compare")
    grown = []
    for what in ("memory", "open", "checkpoints", "files"):
        early, late = (max(each[what] for each in part) for part in (seen[WARM : 2 * WARM], seen[-WARM:]))
        print(f"{what}: {early:.1f} at the beginning, {late:.1f} at the end ({late / early - 1:+.1%})")
        grown += [what] if late > early * (1 + SLACK) else []
    sys.exit(f"grown: {', '.join(grown)}" if grown else 0)


if __name__ == "__main__":
    main()
