"""Times variants of the same work in turn, and prints a table."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Way = TypeVar("Way")


def compare(variants: Mapping[str, Callable[[], object]], repeats: int, device: str) -> None:
    """Median and range of the seconds of each variant, after one warm-up, beside the first one's.

    Args:
        device: of a CPU its seconds at work are counted, of a GPU those that pass.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            seconds = _measured(run, device)
            if repeat:
                times[name].append(seconds)
    reference = statistics.median(next(iter(times.values())))
    print(f"| variant | seconds | {next(iter(times))} = 1 |\n|---|---|---|")
    for name, measured in times.items():
        median = statistics.median(measured)
        print(f"| {name} | {median:.3f} ({min(measured):.3f}-{max(measured):.3f}) | {median / reference:.2f} |")


def _measured(run: Callable[[], object], device: str) -> float:
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def best(ways: Mapping[Way, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[Way, float]:
    """The least seconds of each way, where all take turns so often."""
    least = dict.fromkeys(ways, float("inf"))
    for _ in range(repeats):
        for way, work in ways.items():
            began = clock()
            work()
            least[way] = min(least[way], clock() - began)
    return least
