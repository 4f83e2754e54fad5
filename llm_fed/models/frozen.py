"""The frozen base: what makes a model one, and where it lies."""

from __future__ import annotations

import torch
from torch import nn


def freeze(model: nn.Module) -> None:
    """Make `model` a base: no gradients, eval mode, and 4-bit weights that stay fit for training."""
    model.requires_grad_(False).eval()
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes' first evaluation would turn the weights, for good, into a form
        # whose product has no backward: all gradients that pass through the layer would silently be lost.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def device_of(model: nn.Module) -> torch.device:
    """Where a base's first parameter lies, hence where its inputs go."""
    return next(model.parameters()).device
