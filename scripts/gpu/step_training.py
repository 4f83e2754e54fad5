"""The training table: a cohort's local steps beside stock PEFT and beside one adapter, on bases with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from cohort import Bench
from setting import Benches, Setting, operations
from steps import FLOOR, MEASURED, PEFT, TRAINING

from llm_fed.basics.rng import generator
from llm_fed.engine.calibration import calibrate
from llm_fed.engine.fit import fit
from llm_fed.method.requests import Work
from llm_fed.models.lora import draw


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(setting, benches, case) for case in TRAINING}  # type: ignore[misc]


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    """The figure of one row: `BASE, N clients[, VARIANT]`, or `products`."""
    if case == "products":
        return products(setting)
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    steps = int(variant.split()[0]) if variant.endswith("steps") else 4
    bench = benches.of(base, int(clients.split()[0]), steps)
    if variant == "all-linear r=16":
        bench.structure = replace(bench.structure, rank=16, alpha=32, target_modules="all-linear")
        bench.starts = [draw(bench.model, bench.structure, generator(0, k)) for k in range(bench.args.clients)]
    return setting.with_peak(lambda: timed(setting, bench, variant))


def timed(setting: Setting, bench: Bench, variant: str) -> dict[str, Any]:
    (steps,), examples = bench.args.steps, bench.examples
    tokens = sum(len(e.input_ids) for client in examples for batch in client for e in batch)
    work = Work()
    if variant == PEFT:
        seconds = setting.best(lambda: bench.one_by_one(steps), repeats=1)
    elif variant == FLOOR:
        seconds = min(setting.best(lambda parts=parts: bench.floor(steps, parts)) for parts in (1, 2))  # type: ignore[misc]
    else:
        packing = packing_of(bench) if variant == MEASURED else None
        works: list[Work] = []
        seconds = setting.best(lambda: works.append(trained(bench, steps, packing)))
        work = works[-1]
    figure = {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "tflops": round(operations(bench.args.shapes, tokens) / seconds / 1e12, 1),
    }
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches}
    return figure


def trained(bench: Bench, steps: int, packing: tuple[int, int] | None) -> Work:
    """As `Bench.ours`, with a packing of one's own."""
    model = replace(bench.adapted(bench.structure), packing=packing)
    results, work = fit(model, bench.jobs(steps))
    for result in results:
        if isinstance(result, Exception):
            raise result
    return work


def packing_of(bench: Bench) -> tuple[int, int] | None:
    """What a run would measure first; None where it keeps the constants."""
    found = calibrate(bench.adapted(bench.structure))
    return None if found is None else (found.budget, found.overhead)


def products(setting: Setting) -> dict[str, Any]:
    """The rate of a product of two square matrices."""
    size = 256 if setting.tiny else 8192
    left, right = (torch.randn(size, size, device=setting.device, dtype=getattr(torch, setting.dtype)) for _ in "ab")
    seconds = setting.best(lambda: left @ right, repeats=10)
    return {"seconds": round(seconds, 6), "tflops": round(2 * size**3 / seconds / 1e12, 1)}
