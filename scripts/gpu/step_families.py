"""Families of bases, and the forms in which one is loaded: a cohort trains together, and each client alone as written,
which must come out alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from cohort import synthetic
from setting import Setting, loaded
from steps import EXPERTS, STEPS

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import Lora, draw
from llm_fed.state import State

LORA = Lora(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj"))
SIZES: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "num_local_experts": 8,
}  # fmt: skip
WINDOW = {"sliding_window": 32}  # tokens, fewer than most texts have
TINY: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "num_local_experts": 4,
}  # fmt: skip


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    return {case: lambda case=case: measured(setting, case) for case in STEPS["families"].cases}  # type: ignore[misc]


def measured(setting: Setting, case: str) -> dict[str, Any]:
    family, form = case.split(", ")
    sizes = TINY if setting.tiny else SIZES
    settings: dict[str, Any] = {"dtype": "float32" if form == "fp32" else "bfloat16"}
    if form in ("nf4", "int8"):
        settings["quantization"] = form
    if form == "device_map=auto" and not setting.tiny:  # on a CPU it is refused
        settings["device_map"] = "auto"
    settings["activation_checkpointing"] = form == "activation checkpointing"
    if form == "window":
        sizes = {
            **sizes,
            **WINDOW,
            **({"use_sliding_window": True, "max_window_layers": 4} if "qwen" in family else {}),
        }
    base = loaded(setting, family, sizes, **settings)
    structure = replace(LORA, rank=16, alpha=32, target_modules="all-linear") if "all-linear" in form else LORA
    if form == EXPERTS:
        structure = replace(LORA, parameters=("experts.down_proj", "experts.gate_up_proj"))
    written = AdaptedModel(base.model, structure, autocast=base.autocast)
    free = PaddingFree(forced=False) if base.autocast == torch.bfloat16 else None
    model = replace(written, captures=Captures(), padding_free=free, fuses=True)
    draws = generator(0, "families")
    count, steps = (2, 2) if setting.tiny else (4, 3)
    jobs = []
    for client in range(count):
        batches = [[synthetic(draws, sizes["vocab_size"]) for _ in range(4)] for _ in range(steps)]
        start = draw(base.model, structure, generator(0, client))
        jobs.append(Fit.on(f"{client}", structure, start, batches, Optimizer(1e-3, name="sgd")))
    fit(written, jobs[:1])  # a warm-up
    for _ in range(USES + 1):  # so that the capture itself is not timed
        fit(model, jobs)

    def timed() -> dict[str, Any]:
        together, alone, works = list[State](), list[State](), list[Work]()
        seconds = setting.once(lambda: together.extend(trained(model, jobs, works)))
        each = setting.once(lambda: alone.extend(state for job in jobs for state in trained(written, [job])))
        ways = [float((state - job.start).norm()) for job, state in zip(jobs, alone, strict=True)]
        if min(ways) == 0:
            raise RuntimeError("training went nowhere, so nothing is compared")
        apart = max(distance / way for distance, way in zip(distances(together, alone), ways, strict=True))
        figure = {
            "seconds": round(seconds, 3), "alone_seconds": round(each, 3), "replayed": works[-1].replayed,
            "padding_free": works[-1].padding_free, "apart": float(f"{apart:.2g}"), "why": works[-1].why,
        }  # fmt: skip
        if base.autocast is None or "quantization" in settings:
            return figure
        base.model.float()  # the last use of this base
        truth = trained(replace(written, autocast=None), jobs)
        lost = sum(distances(together, truth)) / sum(distances(alone, truth))
        return {**figure, "of_rounding": round(lost, 2)}

    return setting.with_peak(timed)


def distances(some: list[State], others: list[State]) -> list[float]:
    return [float((one - other).norm()) for one, other in zip(some, others, strict=True)]


def trained(model: AdaptedModel, jobs: list[Fit], works: list[Work] | None = None) -> list[State]:
    results, work = fit(model, jobs)
    if works is not None:
        works.append(work)
    states = []
    for result in results:
        if isinstance(result, ClientError):
            raise result
        states.append(result.state)
    return states
