"""A large base in 4 and 8 bits: what it takes and how fast it trains, beside the same in bfloat16."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from cohort import SHAPES, Bench
from setting import GIB, Setting, loaded
from step_training import timed
from steps import AGAIN, STEPS


def measures(setting: Setting) -> Mapping[str, Callable[[], dict[str, Any]]]:
    return {case: lambda case=case: measured(setting, case) for case in STEPS["nf4"].cases}  # type: ignore[misc]


def measured(setting: Setting, case: str) -> dict[str, Any]:
    shapes, form = case.split(", ")
    shapes = setting.shapes(shapes)
    quantised: dict[str, Any] = {} if form == "bf16" else {"quantization": form}
    base = loaded(setting, "llama", SHAPES[shapes], dtype="bfloat16", **quantised)
    held = sum(tensor.nbytes for tensor in (*base.model.parameters(), *base.model.buffers()))
    tiny = setting.tiny
    args = argparse.Namespace(
        base=None, data=None, shapes=shapes, device=str(setting.device), dtype="bfloat16", dropout=0.0,
        clients=setting.clients(8), steps=[2 if tiny else 4], batch_size=2 if tiny else 4, log_length=4.4,
        lr=5e-4, budget=None,
    )  # fmt: skip
    bench = Bench(args, base.model)
    figure = setting.with_peak(lambda: timed(setting, bench, AGAIN))
    return {**figure, "base_gib": round(held / GIB, 2)}
