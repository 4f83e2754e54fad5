"""Which ways of computing `engine.*` means on a device."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import torch

from llm_fed.engine.end_to_end import has_kernels
from llm_fed.engine.fused import has_library
from llm_fed.settings.config import EngineConfig


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


def ways(asked: EngineConfig, device: torch.device, dtype: str) -> Ways:
    """What is asked for; `auto` is what a GPU has run and found quicker.

    Args:
        dtype: of the passes, as `base.dtype` names it.
    """
    on_gpu = device.type == "cuda"

    def means(setting: str, auto: bool) -> bool:
        return setting == "on" or (setting == "auto" and auto)

    in_half = on_gpu and dtype in ("auto", "bfloat16") and has_kernels(device)
    by = "norms"
    if on_gpu and has_library():
        by = f"norms, rotary embeddings and gates, liger_kernel {version('liger_kernel')}"
    return Ways(
        means(asked.capture, on_gpu), means(asked.padding_free, in_half), by if means(asked.fused, on_gpu) else ""
    )  # fmt: skip
