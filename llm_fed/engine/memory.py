"""What fits into the device's memory: token budgets, retries with half of it, recomputed activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from llm_fed.basics import cgroups
from llm_fed.basics.errors import RunError


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


class Attempts:
    """Budgets of tokens for one piece of work, each half of the one before, until the device's memory suffices.

        for attempt in Attempts(budget):
            with attempt as tokens:
                ...

    Args:
        free: gives memory back before the next attempt.

    Raises:
        RunError: it does not suffice for one example.
    """

    def __init__(self, budget: int, free: Callable[[], None] = lambda: None):
        self._budget, self._done, self._free = budget, False, free

    def __iter__(self) -> Iterator[Attempts]:
        from accelerate.utils.memory import clear_device_cache

        yield self
        while not self._done:  # by now nothing holds the tensors of the attempt that failed
            self._free()
            clear_device_cache(garbage_collection=True)
            self._budget //= 2
            yield self

    def __enter__(self) -> int:
        return self._budget

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        self._done = not out_of_memory(error)
        if not self._done and self._budget <= 1:
            raise RunError(
                "out of memory even with one example at a time; use a smaller base, or for text "
                "base.activation_checkpointing, base.quantization or a smaller task.max_length"
            ) from error
        return not self._done


@contextmanager
def activation_checkpointing(model: nn.Module) -> Iterator[None]:
    """Recompute activations in the layers where `model.gradient_checkpointing_enable()` requested it.

    Transformers itself does so in training mode alone, which would also turn the base's dropout on.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    before = [layer.__dict__.get("forward") for layer in layers]  # accelerate's device hooks replace it, too
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def free_memory(device: torch.device) -> int:
    """Bytes; of a GPU with those that torch has reserved and can use for anything, of a CPU within the limits of its
    container or job."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))  # less where several share it
        free = min(free + torch.cuda.memory_reserved(device), allowed) - torch.cuda.memory_allocated(device)
        return free - _kept_for_graphs(device)
    return cgroups.free_memory()[0]


def _kept_for_graphs(device: torch.device) -> int:
    """Bytes of a GPU that are reserved, not allocated, and of a pool of graphs, which alone may use them."""
    if torch.cuda.get_allocator_backend() != "native":  # another one cannot be looked into
        return 0
    number = torch.cuda.current_device() if device.index is None else device.index
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == number and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def memory_limit(device: torch.device) -> str:
    """What allows less memory than the machine has free, in words; empty of a GPU, and where nothing does."""
    _, limit = cgroups.free_memory() if device.type != "cuda" else (0, None)
    return "" if limit is None else limit.name
