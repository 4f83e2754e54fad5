"""What `engine.fast` means on a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from llm_fed.engine.end_to_end import WINDOW, has_kernels
from llm_fed.engine.fused import has_library
from llm_fed.engine.memory import recomputed
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure

# Families whose passes and answers a GPU has computed so, in the tests marked `gpu` and in scripts/gpu.
TRAINED, ANSWERED = frozenset(("llama", "qwen3")), frozenset(("llama",))


def untried(model: nn.Module, families: Collection[str] = TRAINED, structures: Iterable[Structure] = ()) -> str:
    """Why `auto` leaves passes of this base as they are written; empty where a GPU has run its like otherwise.
    `structures`: what is trained on it; those of whole models count for nothing."""
    config = model.config.to_dict() if isinstance(model, PreTrainedModel) else {"model_type": type(model).__name__}
    adapters = [structure for structure in structures if isinstance(structure, Lora)]
    reasons = {
        config["model_type"]: config["model_type"] not in families,
        "windows of attention": WINDOW in (config.get("layer_types") or ()),
        "recomputed activations": bool(recomputed(model)),
        "DoRA": any(structure.dora for structure in adapters),
        "gates over experts": any(structure.gate != "sum" for structure in adapters),
    }
    return next((f"no GPU has tried it with {what} yet" for what, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Ways:
    """How training passes of adapters are computed, where what is trained allows it.

    Attributes:
        captured: as in `capture`.
        padding_free: as in `passes.Flat`.
        fused: as in `fused`, by what in words; empty: not.
    """

    captured: bool
    padding_free: bool
    fused: str


def ways(requested: Literal["auto", "on", "off"], device: torch.device, dtype: str, *, tried: bool = True) -> Ways:
    """What is requested; `auto` is what a GPU has run and found quicker. `dtype`: of the passes, as `base.dtype` names
    it. `tried`: whether a GPU has run the base's like so (`untried`)."""
    on_gpu = device.type == "cuda"
    fast = requested == "on" or (requested == "auto" and on_gpu and tried)
    by = "norms"
    if on_gpu and has_library():
        by = f"norms, rotary embeddings and gates, liger_kernel {version('liger_kernel')}"
    flat = not on_gpu or (dtype in ("auto", "bfloat16") and has_kernels(device))
    return Ways(captured=fast, padding_free=fast and flat, fused=by if fast else "")


def describe(ways: Ways, device: torch.device, *, adapters: bool, untried: str) -> str:
    """How a run computes its passes, where that is not as written as a matter of course. `adapters`: whether these are
    trained, and not whole models. `untried`: as of `untried`."""
    if not adapters:
        return ""
    if not ways.captured:
        return f"as they are written, as {untried}; engine.fast may be on" if untried else ""
    if device.type != "cuda":
        return f"as on a GPU (engine.fast=on), which gains nothing on {device}"
    flat = ", without padding" if ways.padding_free else ""
    return f"captured as CUDA graphs{flat}, with fused {ways.fused}, where the base and the task allow it (engine.fast)"
