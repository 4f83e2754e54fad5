"""Families of bases, and the forms in which one is loaded: a cohort trains together, and each client alone as written,
which must come out alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from cohort import synthetic
from setting import Setting, loaded
from steps import DROPS, EXPERTS, WIDE

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.capture import USES, Captures
from llm_fed.engine.fit import fit
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit, Work
from llm_fed.models.lora import Lora, draw
from llm_fed.state import State

LORA = Lora(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj"))
STRUCTURES = {
    WIDE: replace(LORA, rank=16, alpha=32, target_modules="all-linear"),
    EXPERTS: replace(LORA, parameters=("experts.down_proj", "experts.gate_up_proj")),
    DROPS: replace(LORA, dropout=0.05),
}
NAMES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "num_local_experts")  # fmt: skip
SIZES = dict(zip(NAMES, (1024, 2816, 8, 16, 4, 64, 32000, 8), strict=True))
TINY = dict(zip(NAMES, (64, 128, 2, 4, 2, 16, 128, 4), strict=True))
WINDOW = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 4}  # fewer tokens than texts have


def measures(setting: Setting) -> Callable[[str], dict[str, Any]]:
    return lambda case: setting.with_peak(lambda: measured(setting, *case.split(", ")))


def measured(setting: Setting, family: str, form: str) -> dict[str, Any]:
    sizes: dict[str, Any] = TINY if setting.tiny else SIZES
    if form == "window":
        sizes = {**sizes, **(WINDOW if "qwen" in family else {"sliding_window": WINDOW["sliding_window"]})}
    settings = {"quantization": form} if form in ("nf4", "int8") else {}
    settings["dtype"] = "float32" if form == "fp32" else "bfloat16"
    base = loaded(setting, family, sizes, activation_checkpointing=form == "activation checkpointing", **settings)
    structure = STRUCTURES.get(form, LORA)
    written = AdaptedModel(base.model, structure, autocast=base.autocast)
    free = base.autocast == torch.bfloat16
    model = replace(written, captures=Captures(), padding_free=free, fuses=True)
    draws, jobs = generator(0, "families"), []
    for client in range(2 if setting.tiny else 4):
        batches = [[synthetic(draws, sizes["vocab_size"]) for _ in range(4)] for _ in range(2 if setting.tiny else 3)]
        start = draw(base.model, structure, generator(0, client))
        jobs.append(Fit.on(f"{client}", structure, start, batches, Optimizer(1e-3, name="sgd")))
    trained(written, jobs[:1])  # a warm-up
    for _ in range(USES + 1):  # so that the capture itself is not timed
        trained(model, jobs)
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
    return {**figure, "of_rounding": round(sum(distances(together, truth)) / sum(distances(alone, truth)), 2)}


def distances(some: list[State], others: list[State]) -> list[float]:
    return [float((one - other).norm()) for one, other in zip(some, others, strict=True)]


def trained(model: AdaptedModel, jobs: list[Fit], works: list[Work] | None = None) -> list[State]:
    results, work = fit(model, jobs)
    if works is not None:
        works.append(work)
    if failed := [result for result in results if isinstance(result, ClientError)]:
        raise failed[0]
    return [result.state for result in results if not isinstance(result, ClientError)]
