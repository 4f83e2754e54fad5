"""A cohort's local steps beside stock PEFT and beside one adapter, on bases with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any
from unittest.mock import patch

import torch
from cohort import SHAPES, Bench
from setting import Benches, Setting, loaded
from steps import ALONE, AS_MANY, DENSE, DROPS, PEFT, WIDE, WRITTEN

from llm_fed.basics.rng import generator
from llm_fed.engine import capture
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import Captures
from llm_fed.engine.fit import fit
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import draw
from llm_fed.tasks.common import Encoded

WARM_UP, WARM_SECONDS = 10, 20.0  # most rounds that are not counted, and after so long no further one of them
ROUNDS = 5  # that are counted


def measures(setting: Setting) -> Callable[[str], dict[str, Any]]:
    benches = Benches(setting)
    return lambda case: measured(setting, benches, case)


def measured(setting: Setting, benches: Benches, case: str) -> dict[str, Any]:
    """The figure of one row: `BASE, N clients[, VARIANT]`."""
    base, clients, variant = (*case.split(", ", 2), "")[:3]
    quantised, wide = variant in ("nf4", "int8"), WIDE in variant
    new = variant in ("", "20 steps", DROPS)  # examples in each round
    model = None
    if quantised:
        shapes = SHAPES["tiny" if setting.tiny else base]
        model = loaded(setting, "llama", shapes, dtype="bfloat16", quantization=variant).model
    bench = benches.of(
        base, int(clients.split()[0]), 20 if "20 steps" in variant else 4,
        batch_size=4 * 100 // 8 if AS_MANY in variant else 4, log_length=5.8 if wide else 4.4,
        rounds=sum(rounds_of(setting)) if new else 1, model=model,
    )  # fmt: skip
    if wide or variant == DROPS:
        wider = {"rank": 16, "alpha": 32, "target_modules": "all-linear"} if wide else {"dropout": 0.05}
        bench.structure = replace(bench.structure, **wider)
        bench.starts = [draw(bench.model, bench.structure, generator(0, k)) for k in range(bench.args.clients)]
    return setting.with_peak(lambda: as_a_run(setting, bench) if new else timed(setting, bench, variant))


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
    tokens = sum(tokens_of(jobs(number)) for number in rounds)
    return {**figure_of(seconds / counted, tokens / counted, reduce(Work.plus, works)), "rounds": counted}


def timed(setting: Setting, bench: Bench, variant: str) -> dict[str, Any]:
    """The same batches again; where passes are captured, until all are."""
    (steps,) = bench.args.steps
    jobs, works = bench.jobs(steps), [Work()]
    model, groups = model_of(bench, variant), [jobs]
    if ALONE in variant:
        groups = [[job] for job in jobs]
    elif variant == DENSE:
        groups = [dense(jobs[0], steps, tokens_of(jobs))]

    def run() -> None:
        if variant == PEFT:
            bench.one_by_one(steps)
        else:
            works.append(reduce(Work.plus, (trained(model, group) for group in groups)))

    with patch.object(capture, "USES", 1):  # each shape is captured at its second time, and not later as in a run
        for _ in range(2):
            run()
    return figure_of(min(setting.once(run) for _ in "ab"), tokens_of(jobs), works[-1])


def tokens_of(jobs: Sequence[Fit]) -> int:
    batches = [job.batch(step) for job in jobs for step in range(len(job.batches))]
    return sum(len(example.input_ids) for batch in batches for example in batch)


def figure_of(seconds: float, tokens: float, work: Work) -> dict[str, Any]:
    """Of one round; the micro-batches are those of all that were counted."""
    figure: dict[str, Any] = {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / seconds)}
    if work.tokens:
        padded = round(work.padded / work.tokens, 2)
        figure |= {"padded_per_useful": padded, "micro_batches": work.micro_batches, "replayed": work.replayed}
    return {**figure, "why": work.why} if work.why else figure


def model_of(bench: Bench, variant: str) -> AdaptedModel:
    """As `auto` computes on a GPU, or as written."""
    model = bench.adapted(bench.structure)
    if WRITTEN in variant:
        return model
    return replace(model, captures=Captures(), padding_free=True, fuses=True)


def dense(job: Fit, steps: int, tokens: int) -> list[Fit]:
    """One client whose steps have as many tokens as those of all, in rows of equal length; a fifth is the response."""
    rows = max(1, round(tokens / steps / 512))
    length, draws = round(tokens / steps / rows), generator(0, "dense")

    def example() -> Encoded:
        ids = torch.randint(2, 1000, (length,), generator=draws).tolist()
        return Encoded(ids, [at >= length - length // 5 for at in range(length)])

    batches = [[example() for _ in range(rows)] for _ in range(steps)]
    return [Fit.on(job.site, job.structure, job.start, batches, job.optimizer)]


def trained(model: AdaptedModel, jobs: Sequence[Fit]) -> Work:
    results, work = fit(model, jobs)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return work
