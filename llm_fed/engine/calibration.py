"""Packing that is measured: before a run trains on a GPU, micro-batches of a few sizes are timed, and a line through
them says what one more costs and how many tokens fit. A step is then timed with that cost and with the constant of
`budget_and_overhead`, which stays unless the measured one is quicker. On a CPU nothing is measured.

Micro-batches only decide how gradients are rounded: each client's result is the same up to that. So a run records what
was measured, and takes it over when it is continued.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any, Protocol

import numpy as np
import torch

from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.memory import activation_checkpointing, budget_and_overhead, free_memory, out_of_memory
from llm_fed.engine.packing import plan

LENGTH = 128  # tokens of an example
SIZES = (512, 1024, 2048, 4096)  # tokens of a micro-batch
REPEATS = 3  # after a first one that counts for nothing; the best counts
SPARE = 0.1  # of the free memory: what the allocator cannot use, and batches whose examples are unlike these
GAIN = 0.03  # of a step's time: what the measured overhead must save, which is more than repeats differ by
STEP = 32, 128  # examples of a step that is timed: by default, and at most

Run = Callable[[Sequence[int]], None]  # trains on a micro-batch of examples of these lengths


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
        kept: why the overhead is the constant; empty where it is the measured one.
    """

    budget: int
    overhead: int
    seconds: tuple[float, float]
    bytes: tuple[float, float]
    kept: str = ""

    def as_json(self) -> dict[str, Any]:
        """For environment.json."""
        return {key: value for key, value in asdict(self).items() if value != ""}

    @property
    def is_host_bound(self) -> bool:
        """Whether even the largest micro-batch that was timed takes longer to launch than to compute."""
        start, each = self.seconds
        return start > each * SIZES[-1]

    def in_words(self) -> str:
        start, each = self.seconds
        line = f"{1e3 * start:.3g} ms, and {1e6 * each:.3g} us per token"
        words = f"at most {self.budget:,} tokens per micro-batch; "
        if self.kept:
            words += f"a further one counts as {self.overhead:,} tokens, the default, as {self.kept}"
        else:
            words += f"a micro-batch has the overhead of {self.overhead:,} tokens ({line})"
        if self.is_host_bound:
            words += f"; the host limits the speed, since a micro-batch takes {line}"
        return words


def calibrate(model: AdaptedModel, reserved: int = 0, examples: int = STEP[0]) -> Calibration | None:
    """Measure how the time and memory of training grow with a micro-batch; takes about two seconds on a GPU.

    Args:
        model: of a kind whose examples differ in length.
        reserved: bytes of the free memory that training needs for itself.
        examples: of all clients that step at once.

    Returns:
        None where nothing is measured: on any device but a GPU, and where all examples are alike.
    """
    if model.device.type != "cuda" or model.examples.probe(LENGTH, LENGTH // 4) is None:
        return None
    run, gauge, default = _training(model), CudaGauge(model.device), budget_and_overhead(model.device)
    measured = settled(probes(run, gauge), free_memory(model.device) - reserved, default)
    return tried(measured, run, gauge, lengths_of(min(examples, STEP[1])), default[1])


def probes(run: Run, gauge: Gauge) -> list[tuple[int, float, int]]:
    """(tokens, best seconds, most bytes) of a micro-batch of each size, as far as memory suffices."""
    timed = []
    for size in SIZES:
        if (taken := _within_memory(run, gauge, [[LENGTH] * (size // LENGTH)])) is None:
            break
        timed.append((size, *taken))
    return timed


def settled(timed: Sequence[tuple[int, float, int]], free: int, default: tuple[int, int]) -> Calibration:
    """Budget and overhead from least-squares lines, seconds = a + b tokens with neither below zero, and
    bytes = c + d tokens. The overhead is a / b, and the budget what fits into `free` bytes but for a spare part.

    Args:
        default: budget and overhead where nothing is measured; the budget is also the most that either may be.
    """
    if len(timed) < 2:
        return Calibration(*default, (0.0, 0.0), (0.0, 0.0), "memory does not suffice for two sizes of micro-batches")
    tokens, seconds, held = (np.array(column, dtype=float) for column in zip(*timed, strict=True))
    (each, start), (grows, fixed) = (np.polyfit(tokens, values, 1) for values in (seconds, held))
    if each <= 0:  # times do not grow
        each, start = 0.0, seconds.mean()
    elif start < 0:
        each, start = (seconds @ tokens) / (tokens @ tokens), 0.0
    most = default[0]
    budget = max(1, min(most, int(((1 - SPARE) * free - fixed) / grows))) if grows > 0 else most
    overhead = round(min(most, start / each)) if each else most
    return Calibration(budget, overhead, (float(start), float(each)), (float(fixed), float(grows)))


def tried(measured: Calibration, run: Run, gauge: Gauge, lengths: Sequence[int], default: int) -> Calibration:
    """What was measured, with the constant overhead unless a step on examples of these lengths takes less time without.

    Args:
        default: the constant.
    """
    if measured.kept:
        return measured
    constant, own = (plan(lengths, measured.budget, overhead) for overhead in (default, measured.overhead))
    if constant == own:
        return replace(measured, overhead=default, kept="the measured one divides a step in the same way")
    before, after = (
        _within_memory(run, gauge, [[lengths[i] for i in batch] for batch in batches]) for batches in (constant, own)
    )
    if after is None:
        return replace(measured, overhead=default, kept="memory does not suffice for a step that is divided less")
    if before is None or after[0] < (1 - GAIN) * before[0]:
        return measured
    line = f"the measured overhead of {measured.overhead:,} tokens saves nothing"
    return replace(measured, overhead=default, kept=f"{line} (a step of {after[0]:.3g} s instead of {before[0]:.3g} s)")


def lengths_of(examples: int) -> list[int]:
    """Of the examples of a step: quantiles of a log-normal distribution around 80 tokens."""
    spread = NormalDist(math.log(80), 0.5)
    return [round(math.exp(spread.inv_cdf((n + 0.5) / examples))) for n in range(examples)]


def _within_memory(run: Run, gauge: Gauge, step: Sequence[Sequence[int]]) -> tuple[float, int] | None:
    """The best seconds and the most bytes of some repeats of a step's micro-batches; None: out of memory."""
    from accelerate.utils.memory import clear_device_cache

    taken = []
    try:
        for repeat in range(REPEATS + 1):
            if repeat:
                gauge.start()
            for lengths in step:
                run(lengths)
            if repeat:
                taken.append(gauge.stop())
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        clear_device_cache(garbage_collection=True)
        return None
    return min(seconds for seconds, _ in taken), max(held for _, held in taken)


def _training(model: AdaptedModel) -> Run:
    """Forward and backward pass of a micro-batch of examples, a quarter of whose tokens count in the loss."""
    bank = model.bank(1)

    def run(lengths: Sequence[int]) -> None:
        several = [model.examples.probe(length, max(1, length // 4)) for length in lengths]
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
