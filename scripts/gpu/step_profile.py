"""Where the time of a cohort's local steps goes: matrix products, other kernels, and waits for the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from setting import Benches, Setting
from step_training import model_of, trained, until_replayed
from steps import STEPS
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PRODUCTS = ("gemm", "cutlass", "nvjet", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
Interval = tuple[float, float]  # begin and end, microseconds


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(setting, benches, case) for case in STEPS["profile"].cases}  # type: ignore[misc]


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    """On a CPU the operations themselves are counted, which shows only that the step works."""
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    bench = benches.of(base, int(clients.split()[0]), steps=2)
    (steps,) = bench.args.steps
    model, jobs = model_of(bench, variant), bench.jobs(steps)
    until_replayed(lambda: trained(model, jobs))
    cuda = setting.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    works = []
    with profile(activities=activities, acc_events=True) as profiler:
        seconds = setting.once(lambda: works.append(trained(model, jobs)))
    events = [event for event in profiler.events() if not event.is_user_annotation]
    if cuda:
        own = kernels = [event for event in events if event.device_type == DeviceType.CUDA]
    else:  # operations nest, so their own time counts, and those that no other holds cover what was busy
        own, kernels = events, [event for event in events if event.cpu_parent is None]
    taken: dict[str, float] = defaultdict(float)
    for event in own:
        taken[event.name] += event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
    busy = union((event.time_range.start, event.time_range.end) for event in kernels)
    total = sum(taken.values())
    products = sum(spent for name, spent in taken.items() if any(part in name.lower() for part in PRODUCTS))
    most = sorted(taken.items(), key=lambda item: -item[1])[:3]
    return {
        "seconds": round(seconds, 3),
        "busy": round(100 * busy / (1e6 * seconds), 1),
        "products": round(100 * products / total, 1),
        "gaps": round(100 - 100 * busy / (1e6 * seconds), 1),
        "launches": round(len(kernels) / works[-1].micro_batches),
        "most": ", ".join(f"{name[:40]} {100 * spent / total:.0f} %" for name, spent in most),
    }


def union(intervals: Iterable[Interval]) -> float:
    """The time that at least one interval covers."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
