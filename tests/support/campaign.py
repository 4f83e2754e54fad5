"""Campaigns, which `make long` runs: many cases of one check, how many came out how, and what failed where."""

import argparse
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Case = tuple[object, Callable[[], str]]  # its name, and a check that says how it came out or raises: a finding


class Slow(BaseException):
    """More seconds of computing than a case may take; nothing in the project catches it."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within it so many seconds of this process at work, since others may keep the machine busy."""

    def out_of_time(*given: object) -> None:
        raise Slow(f"it took {seconds} s of computing")

    signal.signal(signal.SIGPROF, out_of_time)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def bound_memory(gib: int = 2) -> None:
    """So much more than this process has with all imports."""
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (pages + gib * 2**30,) * 2)


def main(doc: str | None, tried: Callable[[Any], Iterable[Case]], /, seconds: float = 600, **options: Any) -> None:
    """The script of a campaign: exit code 1 where a case has failed.

    Args:
        tried: the cases, of the command's options.
        options: of the command, with their defaults; of a tuple some of its members may be chosen.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in options.items():
        several: Any = {"nargs": "+", "choices": usual} if isinstance(usual, tuple) else {"type": type(usual or Path())}
        parser.add_argument(f"--{name}", default=usual, **several)
    torch.set_num_threads(1)
    outcomes, began, slowest = Counter[str](), time.monotonic(), 0.0
    for name, check in tried(parser.parse_args()):
        before = time.process_time()
        try:
            with limited(seconds):
                outcomes[check()] += 1
        except KeyboardInterrupt:
            break
        except BaseException as error:  # PyO3's panics are no Exceptions
            outcomes["findings"] += 1
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error)[:2000]}"
            print(f"{name}: {said} ({where.filename}:{where.lineno})", flush=True)
        slowest = max(slowest, time.process_time() - before)
        if outcomes.total() % 1000 == 0:
            print(f"{outcomes.total():,}: {dict(outcomes)}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    took = f"{time.monotonic() - began:.0f} s, the slowest {slowest:.1f} s, at most {peak:.1f} GiB"
    print(f"{outcomes.total():,} cases in {took}: {dict(outcomes)}")
    sys.exit(bool(outcomes["findings"]))
