"""The training table: a cohort's local steps beside stock PEFT and beside one adapter, on bases with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from cohort import Bench
from setting import Benches, Setting, operations
from steps import ALONE, AS_MANY, DENSE, DROPS, FLOOR, KEYED, MEASURED, PEFT, PLAIN, ROWS, TRAINING, WIDE, WRITTEN

from llm_fed.basics.rng import generator
from llm_fed.engine import capture
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.calibration import calibrate
from llm_fed.engine.capture import Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import draw
from llm_fed.tasks.common import Encoded

capture.USES = 1  # a shape is captured when it comes a second time, and not later


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(setting, benches, case) for case in TRAINING}  # type: ignore[misc]


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    """The figure of one row: `BASE, N clients[, VARIANT]`, or `products`."""
    if case == "products":
        return products(setting)
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    steps = int(variant.split()[0]) if "steps" in variant else 4
    batch = {AS_MANY: 4 * 100 // 8}.get(variant, 4)
    wide = WIDE in variant
    bench = benches.of(base, int(clients.split()[0]), steps, batch_size=batch, log_length=5.8 if wide else 4.4)
    if DROPS in variant:
        bench.structure = replace(bench.structure, dropout=0.05)
    if wide:
        bench.structure = replace(bench.structure, rank=16, alpha=32, target_modules="all-linear")
    if wide or DROPS in variant:
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
        jobs, model = bench.jobs(steps), model_of(bench, variant)
        groups = (
            [[job] for job in jobs]
            if variant == ALONE
            else [dense(jobs[0], steps, tokens)]
            if variant == DENSE
            else [jobs]
        )
        works: list[Work] = []

        def run() -> None:
            works.append(reduce(Work.plus, (trained(model, group) for group in groups)))

        if model.captures:
            run()  # and what comes again is captured
        seconds, work = setting.best(run, repeats=1 if len(jobs) > 32 else 2), works[-1]
    figure = {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "tflops": round(operations(bench.args.shapes, tokens) / seconds / 1e12, 1),
    }
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches, "replayed": work.replayed}
    return {**figure, "why": work.why} if work.why else figure


def model_of(bench: Bench, variant: str) -> AdaptedModel:
    """As `auto` computes on a GPU, but for what the variant leaves out."""
    model = bench.adapted(bench.structure)
    if MEASURED in variant:
        return replace(model, packing=packing_of(bench))
    if WRITTEN in variant:
        return model
    free = None if variant == ROWS else PaddingFree(forced=False)
    return replace(
        model, captures=Captures(), padding_free=free, fuses=variant != PLAIN, keyed_masks=KEYED in variant
    )  # fmt: skip


def dense(job: Fit, steps: int, tokens: int) -> list[Fit]:
    """One client whose steps have as many tokens as those of all, in rows of equal length without padding."""
    rows = max(1, round(tokens / steps / 512))
    length = round(tokens / steps / rows)
    draws = generator(0, "dense")
    batches = [[of_length(draws, length) for _ in range(rows)] for _ in range(steps)]
    return [Fit.on(job.site, job.structure, job.start, batches, job.optimizer)]


def of_length(draws: torch.Generator, length: int) -> Encoded:
    """A fifth of it is the response."""
    ids = torch.randint(2, 1000, (length,), generator=draws).tolist()
    return Encoded(ids, [place >= length - length // 5 for place in range(length)])


def trained(model: AdaptedModel, jobs: Sequence[Fit]) -> Work:
    results, work = fit(model, jobs)
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
