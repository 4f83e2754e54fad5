"""Packing that is measured: before a run trains on a GPU, micro-batches of a few sizes are timed, and a line through
them says what one more costs and how many tokens fit. On a CPU the constants of `budget_and_overhead` stay.

Micro-batches only decide how gradients are rounded: each client's result is the same up to that. So a run records what
was measured, and takes it over when it is continued.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.memory import activation_checkpointing, budget_and_overhead, free_memory

LENGTH = 128  # tokens of an example
SIZES = (512, 1024, 2048, 4096)  # tokens of a micro-batch
REPEATS = 3  # after a first one that counts for nothing; the best counts
SPARE = 0.1  # of the free memory: what the allocator cannot use, and batches whose examples are unlike these


class Gauge(Protocol):
    """What a device tells of what it did in between."""

    def start(self) -> None: ...

    def stop(self) -> tuple[float, int]:
        """Seconds, and the most bytes that were held on top of what was there at the start."""
        ...


class CudaGauge:
    """Waits for the GPU at both ends."""

    def __init__(self, device: torch.device):
        self._device, self._began, self._held = device, 0.0, 0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._held, self._began = torch.cuda.memory_allocated(self._device), time.perf_counter()

    def stop(self) -> tuple[float, int]:
        torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        return seconds, torch.cuda.max_memory_allocated(self._device) - self._held


@dataclass(frozen=True)
class Calibration:
    """What was measured, and what follows.

    Attributes:
        budget: most tokens of a micro-batch.
        overhead: what one more micro-batch costs, in tokens.
        seconds, bytes: the lines: of a micro-batch without tokens, and for each token.
    """

    budget: int
    overhead: int
    seconds: tuple[float, float]
    bytes: tuple[float, float]

    def as_json(self) -> dict[str, Any]:
        """For environment.json."""
        return asdict(self)

    def in_words(self) -> str:
        start, each = self.seconds
        return (
            f"at most {self.budget:,} tokens per micro-batch; a micro-batch has the overhead of {self.overhead:,} "
            f"tokens ({1e3 * start:.3g} ms, and {1e6 * each:.3g} us per token)"
        )


def calibrate(model: AdaptedModel, reserved: int = 0) -> Calibration | None:
    """Measure how the time and memory of training grow with a micro-batch; takes about a second on a GPU.

    Args:
        model: of a kind whose examples differ in length.
        reserved: bytes of the free memory that training needs for itself.

    Returns:
        None where the constants stay: on any device but a GPU, or where times do not grow with the tokens.
    """
    if model.device.type != "cuda" or model.examples.probe(LENGTH, LENGTH // 4) is None:
        return None
    free = free_memory(model.device) - reserved
    return settled(probes(_training(model), CudaGauge(model.device)), free, budget_and_overhead(model.device)[0])


def probes(run: Callable[[int], None], gauge: Gauge) -> list[tuple[int, float, int]]:
    """(tokens, best seconds, most bytes) of a micro-batch of each size, as far as memory suffices."""
    from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

    measured = []
    for size in SIZES:
        try:
            run(size)
            taken = []
            for _ in range(REPEATS):
                gauge.start()
                run(size)
                taken.append(gauge.stop())
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            clear_device_cache(garbage_collection=True)
            break
        measured.append((size, min(seconds for seconds, _ in taken), max(held for _, held in taken)))
    return measured


def settled(measured: Sequence[tuple[int, float, int]], free: int, most: int) -> Calibration | None:
    """Budget and overhead from least-squares lines, seconds = a + b tokens and bytes = c + d tokens: the overhead is
    a / b, and the budget what fits into `free` bytes but for a spare part, at most `most` tokens.

    Returns:
        None: fewer than two sizes were measured, or what was does not grow with the tokens.
    """
    if len(measured) < 2:
        return None
    tokens, seconds, held = (np.array(column, dtype=float) for column in zip(*measured, strict=True))
    (each, start), (grows, fixed) = (np.polyfit(tokens, values, 1) for values in (seconds, held))
    if each <= 0 or grows <= 0:
        return None
    budget = max(1, min(most, int(((1 - SPARE) * free - fixed) / grows)))
    overhead = round(max(0.0, start / each))
    return Calibration(budget, min(overhead, most), (float(start), float(each)), (float(fixed), float(grows)))


def _training(model: AdaptedModel) -> Callable[[int], None]:
    """Forward and backward pass of a micro-batch of so many tokens, a quarter of which count in the loss."""
    bank = model.bank(1)
    example = model.examples.probe(LENGTH, LENGTH // 4)

    def run(tokens: int) -> None:
        several = [example] * (tokens // LENGTH)
        batch = model.examples.collate(several)
        sizes = [size for each in several for size in model.examples.sizes(each)]
        masks = bank.draw_masks(range(len(sizes)), sizes)
        mix = torch.ones(len(sizes), len(model.structure.experts)) if model.structure.gate == "mix" else None
        index = torch.zeros(len(sizes), dtype=torch.int64)
        with bank.attached(index, masks, mix), activation_checkpointing(model.model):
            with model.computing():
                losses = model.examples.losses(model.model, batch, all_rows=bank.adapts_head)
            losses.sum().backward()

    return run
