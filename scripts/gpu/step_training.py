"""The training table: a cohort's local steps beside stock PEFT and beside one adapter, on bases with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from cohort import Bench
from setting import Benches, Setting, operations
from steps import CAPTURED, FLOOR, FREE, MEASURED, PEFT, TRAINING

from llm_fed.basics.rng import generator
from llm_fed.engine.calibration import calibrate
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.requests import Fitted, Work
from llm_fed.models.lora import draw


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(setting, benches, case) for case in TRAINING}  # type: ignore[misc]


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    """The figure of one row: `BASE, N clients[, VARIANT]`, or `products`."""
    if case == "products":
        return products(setting)
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    steps = int(variant.split()[0]) if "steps" in variant else 4
    bench = benches.of(base, int(clients.split()[0]), steps)
    if variant == "all-linear r=16":
        bench.structure = replace(bench.structure, rank=16, alpha=32, target_modules="all-linear")
        bench.starts = [draw(bench.model, bench.structure, generator(0, k)) for k in range(bench.args.clients)]
    return setting.with_peak(lambda: timed(setting, bench, variant))


def timed(setting: Setting, bench: Bench, variant: str) -> dict[str, Any]:
    (steps,), examples = bench.args.steps, bench.examples
    tokens = sum(len(e.input_ids) for client in examples for batch in client for e in batch)
    work, more = Work(), dict[str, Any]()
    if variant == PEFT:
        seconds = setting.best(lambda: bench.one_by_one(steps), repeats=1)
    elif variant == FLOOR:
        seconds = min(setting.best(lambda parts=parts: bench.floor(steps, parts)) for parts in (1, 2))  # type: ignore[misc]
    else:
        packing = packing_of(bench) if variant == MEASURED else None
        captures = Captures() if CAPTURED in variant else None
        free = PaddingFree() if variant.endswith(FREE) else None
        works: list[Work] = []

        def run() -> list[Fitted]:
            results, work = trained(bench, steps, packing, captures, free)
            works.append(work)
            return results

        for _ in range(USES if captures else 0):  # then whatever comes often enough is captured
            run()
        seconds, work = setting.best(run), works[-1]
        if captures or free:
            more = {"replayed": work.replayed, "apart": apart(run(), trained(bench, steps, packing)[0], bench, steps)}
            if said := [*(captures.said if captures else ()), *(free.said if free else ())]:
                more["why"] = "; ".join(said)
    figure = {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "tflops": round(operations(bench.args.shapes, tokens) / seconds / 1e12, 1),
    }
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches}
    return figure | more


def trained(
    bench: Bench,
    steps: int,
    packing: tuple[int, int] | None,
    captures: Captures | None = None,
    free: PaddingFree | None = None,
) -> tuple[list[Fitted], Work]:
    """As `Bench.ours`, with a packing of one's own, captured passes, and texts end to end."""
    model = replace(bench.adapted(bench.structure), packing=packing, captures=captures, padding_free=free)
    results, work = fit(model, bench.jobs(steps))
    fitted = []
    for result in results:
        if isinstance(result, Exception):
            raise result
        fitted.append(result)
    return fitted, work


def apart(results: Sequence[Fitted], others: Sequence[Fitted], bench: Bench, steps: int) -> float:
    """How far two results are from each other, as a share of the way from the start."""
    starts = torch.stack([job.start.row for job in bench.jobs(steps)]).double()
    one, other = (torch.stack([each.state.row for each in some]).double() for some in (results, others))
    return float(f"{(one - other).norm() / (other - starts).norm():.2g}")


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
