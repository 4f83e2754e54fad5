"""Which ways of computing `engine.*` means on a device."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from llm_fed.engine.end_to_end import has_kernels, windowed
from llm_fed.engine.fused import has_library
from llm_fed.settings.config import EngineConfig

# Families whose passes and answers a GPU has computed so, in the tests marked `gpu` and in scripts/gpu.
TRAINED, ANSWERED = frozenset(("llama", "qwen3")), frozenset(("llama",))


def untried(model: nn.Module, families: Collection[str] = TRAINED, structures: Iterable[Any] = ()) -> str:
    """Why `auto` leaves passes of this base as they are written; empty where a GPU has run its like otherwise.

    Args:
        structures: what is trained on it; those of whole models count for nothing.
    """
    family = getattr(getattr(model, "config", None), "model_type", "such a model")
    if family not in families:
        return f"no GPU has tried it with {family} yet"
    if windowed(model):
        return "no GPU has tried it with windows of attention yet"
    if getattr(model, "is_quantized", False) or getattr(model, "quantization_method", None):
        return "no GPU has tried it with quantised weights yet"
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        return "no GPU has tried it with recomputed activations yet"
    return next(filter(None, map(_unlike, structures)), "")


def _unlike(structure: Any) -> str:
    """The same of what is trained: plain adapters on linear layers are what GPUs have run so."""
    if not structure.fused:
        return ""
    for what, holds in {
        "DoRA": structure.dora,
        "gates over experts": structure.gate != "sum",
        "adapters on the experts of a mixture": structure.parameters,
        "layers that are trained whole": structure.whole,
    }.items():
        if holds:
            return f"no GPU has tried it with {what} yet"
    return ""


@dataclass(frozen=True)
class Ways:
    """How training passes of adapters are computed, where what is trained allows it.

    Attributes:
        captured: as in `capture`.
        padding_free: as in `padding_free`.
        fused: as in `fused`, by what in words; empty: not.
    """

    captured: bool
    padding_free: bool
    fused: str


def ways(asked: EngineConfig, device: torch.device, dtype: str, *, tried: bool = True) -> Ways:
    """What is asked for; `auto` is what a GPU has run and found quicker.

    Args:
        dtype: of the passes, as `base.dtype` names it.
        tried: whether a GPU has run the base's like so (`untried`).
    """
    on_gpu = device.type == "cuda"
    auto_is_on = on_gpu and tried

    def means(setting: str, auto: bool) -> bool:
        return setting == "on" or (setting == "auto" and auto)

    in_half = auto_is_on and dtype in ("auto", "bfloat16") and has_kernels(device)
    by = "norms"
    if on_gpu and has_library():
        by = f"norms, rotary embeddings and gates, liger_kernel {version('liger_kernel')}"
    return Ways(
        captured=means(asked.capture, auto_is_on),
        padding_free=means(asked.padding_free, in_half),
        fused=by if means(asked.fused, auto_is_on) else "",
    )
