"""What taking digests costs: the share of a run's processor time that goes into digests.jsonl, on the quickstart.

python scripts/analysis/audit_cost.py --rounds 10 --out DIR
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from llm_fed.basics.terminal import lasting_streams
from llm_fed.commands.quickstart import ASSETS
from llm_fed.experiment import run
from llm_fed.runs.digests import Digests
from llm_fed.runs.rows import StoredRow
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile


class Clock:
    """Sums up the processor time of the functions that it wraps, one within another counted once."""

    def __init__(self) -> None:
        self.seconds, self._inside = 0.0, False

    def wrap(self, real: Any) -> Any:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:
                return real(*args, **options)
            self._inside, start = True, time.process_time()
            try:
                return real(*args, **options)
            finally:
                self.seconds += time.process_time() - start
                self._inside = False

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    for name in ("begin", "sent", "round", "end", "mark"):
        setattr(Digests, name, clock.wrap(getattr(Digests, name)))
    timed = clock.wrap(StoredRow.digest.fget)  # type: ignore[attr-defined]
    StoredRow.digest = property(timed)  # type: ignore[method-assign, assignment]
    words = [f"base.name={ASSETS / 'tiny-base'}", f"rounds={given.rounds}"]
    config = configfile.load(ASSETS / "quickstart.yaml", words)
    start = time.process_time()
    run.train(config, given.out, fresh=True, reporter=Reporter(Console(quiet=True)))
    whole = time.process_time() - start
    print(f"{given.rounds} rounds: {clock.seconds:.2f} of {whole:.1f} s, {clock.seconds / whole:.2%}")


if __name__ == "__main__":
    with lasting_streams():
        main()
