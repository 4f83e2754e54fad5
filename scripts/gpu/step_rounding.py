"""What 16 bits lose in one step of gradient descent, whichever way a GPU computes it: how far the update is from that
of float32, as a share of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from cohort import Bench
from setting import Benches, Setting
from steps import STEPS, WAYS
from torch import Tensor, nn

from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.optimizer import Optimizer


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    benches = Benches(setting)
    return {case: lambda case=case: measured(benches.of(case, 8, 1)) for case in STEPS["rounding"].cases}  # type: ignore[misc]


def measured(bench: Bench) -> dict[str, Any]:
    """By way of computing the error in percent, and whether captured is as it is written to the last bit."""
    found: dict[str, Tensor] = {}
    for way in WAYS:
        captures = Captures() if "captured" in way else None
        free = PaddingFree() if "no padding" in way else None
        model = replace(
            bench.adapted(bench.structure), captures=captures, padding_free=free, fuses="fused" in way
        )  # fmt: skip
        for _ in range(USES + 2 if captures else 1):
            found[way] = update(bench, model)
    model_of_all, dtype = cast(nn.Module, bench.model), bench.model.dtype
    model_of_all.float()
    try:
        truth = update(bench, replace(bench.adapted(bench.structure), autocast=None))
    finally:
        model_of_all.to(dtype)
    return {way: round(float(100 * (each - truth).norm() / truth.norm()), 2) for way, each in found.items()}


def update(bench: Bench, model: AdaptedModel) -> Tensor:
    """(clients, P) in float64: what one step changes."""
    jobs = [replace(job, batches=job.batches[:1], optimizer=Optimizer(1e-3, name="sgd")) for job in bench.jobs(1)]
    results, _ = fit(model, jobs)
    changes = []
    for job, result in zip(jobs, results, strict=True):
        if isinstance(result, Exception):
            raise result
        changes.append(result.state.row.double() - job.start.row.double())
    return torch.stack(changes)
