"""What `llm-fed doctor` checks: the machine, the libraries, and that the pieces which can break really work here."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from llm_fed.basics import cgroups
from llm_fed.models import loading
from llm_fed.models.loading import settle_dtype
from llm_fed.settings.config import BaseConfig

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets", "bitsandbytes")
TINY_BASE = Path(__file__).parents[1] / "assets" / "tiny-base"


def examine() -> list[dict[str, Any]]:
    """One finding per check: {what, found, ok}. A check that raises is a finding that is not ok."""
    checks: dict[str, Callable[[], str]] = {
        "libraries": lambda: ", ".join(f"{name} {importlib.metadata.version(name)}" for name in LIBRARIES),
        "device": _device,
        "memory and disk": _space,
        "speed of bfloat16": _dtypes,
        "fused training (two clients, one step, shipped base)": lambda: _train(None),
        "4-bit base (bitsandbytes nf4)": lambda: _train("nf4"),
        "metrics without network": _metrics,
    }
    findings = []
    for what, check in checks.items():
        try:
            findings.append({"what": what, "found": check(), "ok": True})
        except Exception as error:
            findings.append({"what": what, "found": f"{type(error).__name__}: {error}", "ok": False})
    return findings


def _device() -> str:
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return f"{torch.cuda.get_device_name()}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads; torch finds no GPU"


def _space() -> str:
    (free, limit), disk = cgroups.free_memory(), shutil.disk_usage(".")
    within = "" if limit is None else f" (within {limit.name}, which is {limit.size / 2**30:.1f} GiB)"
    return f"{free / 2**30:.1f} GiB of memory{within} and {disk.free / 2**30:.1f} GiB of disk free"


def _dtypes() -> str:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, _ = settle_dtype(BaseConfig(dtype="auto"), device)
    cuda = device == "cuda"
    computes = torch.cuda.is_bf16_supported(including_emulation=False) if cuda else loading.computes_in_bfloat16()
    return (
        f"bfloat16 is {'computed by this device' if computes else 'emulated on this device, so slow'}; base.dtype=auto "
        f"chooses {base.dtype} here"
    )


def _train(quantization: Literal["nf4"] | None) -> str:
    from llm_fed.basics.rng import generator
    from llm_fed.engine.bank import AdaptedModel
    from llm_fed.engine.fit import fit
    from llm_fed.kinds.language import load_base
    from llm_fed.method.optimizer import Optimizer
    from llm_fed.method.requests import Fit
    from llm_fed.models.lora import Lora, draw
    from llm_fed.tasks.common import Encoded

    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = load_base(BaseConfig(name=str(TINY_BASE), dtype="float32", quantization=quantization), device)
    structure = Lora(2, 4, 0.0, ("q_proj", "v_proj"))
    start = draw(base.model, structure, generator(0))
    example = Encoded([1, 5, 6, 7], [False, False, True, True])
    jobs = [Fit.on(name, structure, start, [[example]], Optimizer(1e-3)) for name in "ab"]
    results, _ = fit(AdaptedModel(base.model, structure, autocast=base.autocast), jobs)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return f"loss {results[0].losses[0]:.3f}"  # type: ignore[union-attr]


def _metrics() -> str:
    from llm_fed.scoring.scores import score

    return f"rouge1 of equal texts is {score('rouge1', ['a b'], [('a b',)]):.0f}"
