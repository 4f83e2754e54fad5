"""What fits into the device's memory: token budgets, retries with half of it, recomputed activations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm_fed.basics import cgroups
from llm_fed.basics.errors import RunError
from llm_fed.engine.swapped import forwards

Result = TypeVar("Result")


def budget_and_overhead(device: torch.device) -> tuple[int, int]:
    """Most tokens of a micro-batch, and what one more micro-batch costs in tokens.

    On the CPU as measured (docs/results/log/performance.md); elsewhere reasoned, not measured.
    """
    return (1024, 32) if device.type == "cpu" else (16384, 512)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that a device's memory does not suffice: torch's own words, or a driver's, whose line ends
    without a full stop."""
    from accelerate.utils.memory import should_reduce_batch_size

    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or "error: out of memory" in str(error)


def within_memory(run: Callable[[int], Result], budget: int, free: Callable[[], None] = lambda: None) -> Result:
    """`run(budget)`, with half the budget as often as the device's memory does not suffice.

    Args:
        free: gives memory back before the next attempt.

    Raises:
        RunError: it does not suffice for one example.
    """
    from accelerate.utils.memory import clear_device_cache

    while True:
        try:
            return run(budget)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if budget <= 1:
                raise RunError(
                    "out of memory even with one example at a time; use a smaller base, or for text "
                    "base.activation_checkpointing, base.quantization or a smaller task.max_length"
                ) from error
        free()  # by now nothing holds the tensors of the attempt that failed
        clear_device_cache(garbage_collection=True)
        budget //= 2


def activation_checkpointing(model: nn.Module) -> AbstractContextManager[None]:
    """Recompute activations in the layers where `model.gradient_checkpointing_enable()` requested it.

    Transformers itself does so in training mode alone, which would also turn the base's dropout on.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    return forwards(
        {layer: partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False) for layer in layers}
    )


def is_spread(model: nn.Module) -> bool:
    """Whether the layers of a model lie on several devices."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def free_memory(device: torch.device) -> int:
    """Bytes; of a GPU with those that torch has reserved and can use for anything, of a CPU within the limits of its
    container or job."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))  # less where several share it
        return min(free + torch.cuda.memory_reserved(device), allowed) - torch.cuda.memory_allocated(device)
    return cgroups.free_memory()[0]


def memory_limit(device: torch.device) -> str:
    """What allows less memory than the machine has free, in words; empty of a GPU, and where nothing does."""
    _, limit = cgroups.free_memory() if device.type != "cuda" else (0, None)
    return "" if limit is None else limit.name
