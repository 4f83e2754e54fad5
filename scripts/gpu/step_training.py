"""The training table: a cohort's local steps beside stock PEFT and beside one adapter, on bases with random weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import torch
from cohort import Bench
from setting import Benches, Setting, operations
from steps import (
    ALONE,
    AS_MANY,
    COLD,
    DENSE,
    DROPS,
    FLOOR,
    PEFT,
    PLAIN,
    ROWS,
    TRAINING,
    WIDE,
    WRITTEN,
)

from llm_fed.basics.rng import generator
from llm_fed.engine import capture
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import draw
from llm_fed.tasks.common import Encoded

WARM_UP, WARM_SECONDS = 10, 20.0  # most rounds that are not counted, and after so long no further one of them
ROUNDS = 5  # that are counted


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(setting, benches, case) for case in TRAINING}  # type: ignore[misc]


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    """The figure of one row: `BASE, N clients[, VARIANT]`, or `products`."""
    if case == "products":
        return products(setting)
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    steps = int(variant.split()[0]) if "steps" in variant else 4
    batch = 4 * 100 // 8 if AS_MANY in variant else 4
    wide = WIDE in variant
    new = not variant or variant == "20 steps"  # examples in each round
    bench = benches.of(
        base, int(clients.split()[0]), steps, batch_size=batch, log_length=5.8 if wide else 4.4,
        rounds=sum(rounds_of(setting)) if new else 1,
    )  # fmt: skip
    if DROPS in variant:
        bench.structure = replace(bench.structure, dropout=0.05)
    if wide:
        bench.structure = replace(bench.structure, rank=16, alpha=32, target_modules="all-linear")
    if wide or DROPS in variant:
        bench.starts = [draw(bench.model, bench.structure, generator(0, k)) for k in range(bench.args.clients)]
    if new:
        return setting.with_peak(lambda: as_a_run(setting, bench))
    if variant == COLD:
        return setting.with_peak(lambda: cold(setting, bench))
    return setting.with_peak(lambda: timed(setting, bench, variant))


def rounds_of(setting: Setting) -> tuple[int, int]:
    """Most that are not counted, and those that are."""
    return (2, 2) if setting.tiny else (WARM_UP, ROUNDS)


def as_a_run(setting: Setting, bench: Bench) -> dict[str, Any]:
    """Rounds with new examples each: shapes are captured as a run captures them, and what has none is not replayed."""
    steps = bench.args.steps[0]
    most, counted = rounds_of(setting)
    model, every = model_of(bench, ""), bench.jobs(steps * (most + counted))

    def jobs(number: int) -> list[Fit]:
        return [replace(job, batches=job.batches[number * steps : (number + 1) * steps]) for job in every]

    before, passed = 0, 0.0
    while before < most and passed < WARM_SECONDS:
        passed += setting.once(partial(trained, model, jobs(before)))
        before += 1
    works: list[Work] = []
    rounds = range(before, before + counted)
    seconds = setting.once(lambda: works.extend(trained(model, jobs(number)) for number in rounds))
    work, tokens = reduce(Work.plus, works), sum(tokens_of(jobs(number)) for number in rounds)
    figure = figure_of(bench, seconds / counted, tokens / counted, work)
    return {**figure, "rounds": counted, "warm_up": before}


def cold(setting: Setting, bench: Bench) -> dict[str, Any]:
    """What is called has been loaded, by a step of which nothing stays, and no shape has come yet."""
    (steps,) = bench.args.steps
    trained(model_of(bench, ""), bench.jobs(1))
    jobs, model = bench.jobs(steps), model_of(bench, "")
    works: list[Work] = []
    seconds = setting.once(lambda: works.append(trained(model, jobs)))
    return figure_of(bench, seconds, tokens_of(jobs), works[-1])


def timed(setting: Setting, bench: Bench, variant: str) -> dict[str, Any]:
    """The same batches again and again; where passes are captured, until all are."""
    (steps,) = bench.args.steps
    jobs = bench.jobs(steps)
    tokens, works = tokens_of(jobs), [Work()]
    if variant == PEFT:
        seconds = setting.best(lambda: bench.one_by_one(steps), repeats=1)
    elif variant == FLOOR:
        seconds = min(setting.best(lambda parts=parts: bench.floor(steps, parts)) for parts in (1, 2))  # type: ignore[misc]
    else:
        model, groups = model_of(bench, variant), [jobs]
        if ALONE in variant:
            groups = [[job] for job in jobs]
        elif variant == DENSE:
            groups = [dense(jobs[0], steps, tokens)]

        def run() -> None:
            works.append(reduce(Work.plus, (trained(model, group) for group in groups)))

        if model.captures:
            until_replayed(run)
        seconds = setting.best(run, repeats=1 if len(jobs) > 32 else 2)
    return figure_of(bench, seconds, tokens, works[-1])


def until_replayed(run: Callable[[], object]) -> None:
    """Twice, after which each shape is captured: at its second time, and not later as in a run."""
    with patch.object(capture, "USES", 1):
        for _ in range(2):
            run()


def tokens_of(jobs: Sequence[Fit]) -> int:
    batches = [job.batch(step) for job in jobs for step in range(len(job.batches))]
    return sum(len(example.input_ids) for batch in batches for example in batch)


def figure_of(bench: Bench, seconds: float, tokens: float, work: Work) -> dict[str, Any]:
    """Of one round; the micro-batches are those of all that were counted."""
    figure = {
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds),
        "tflops": round(operations(bench.args.shapes, round(tokens)) / seconds / 1e12, 1),
    }
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches, "replayed": work.replayed}
    return {**figure, "why": work.why} if work.why else figure


def model_of(bench: Bench, variant: str) -> AdaptedModel:
    """As `auto` computes on a GPU, but for what the variant leaves out."""
    model = bench.adapted(bench.structure)
    if WRITTEN in variant:
        return model
    free = None if ROWS in variant else PaddingFree(forced=False)
    return replace(model, captures=Captures(), padding_free=free, fuses=PLAIN not in variant)


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


def products(setting: Setting) -> dict[str, Any]:
    """The rate of a product of two square matrices."""
    size = 256 if setting.tiny else 8192
    left, right = (torch.randn(size, size, device=setting.device, dtype=getattr(torch, setting.dtype)) for _ in "ab")
    seconds = setting.best(lambda: left @ right, repeats=10)
    return {"seconds": round(seconds, 6), "tflops": round(2 * size**3 / seconds / 1e12, 1)}
