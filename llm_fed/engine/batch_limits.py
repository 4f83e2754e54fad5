"""How many rows of answers fit into memory at once: `eval.batch_size` is the most, and where memory does not suffice
batches are halved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from llm_fed.engine import footprint
from llm_fed.engine.memory import Attempts, budget_and_overhead, free_memory
from llm_fed.models.base import Base

log = logging.getLogger(__name__)

SMALL = 4  # times a micro-batch of training: a batch of fewer tokens takes less memory than training does
SHARES = {"cpu": 0.5}  # of the free memory; other programs need some of a machine's, too
SHARE = 0.8  # of a GPU's
STEP = 64  # tokens to which lengths are rounded up, so that few of them are measured

MOST = {"cpu": 32}  # rows, where `eval.batch_size` says nothing
MOST_ON_GPU = 256  # 1,040 answers of a base of 135M took 2.98 s on an H200, with 1,024 rows 3.88 s, with 32 rows 20.5 s

_said: WeakSet[nn.Module] = WeakSet()
_measured: WeakKeyDictionary[nn.Module, dict[int, footprint.ReadingMemory]] = WeakKeyDictionary()


def most_rows(asked: int | None, device: torch.device) -> int:
    """The most rows of a batch of answers: as asked for, or by device."""
    return asked or MOST.get(device.type, MOST_ON_GPU)


@dataclass(frozen=True)
class BatchLimit:
    """The rows of a batch of prompts.

    Attributes:
        base: which answers.
        most: rows that were asked for.
        new: tokens that follow each prompt at most.
        logits: of each row that are held at once, behind the first.
    """

    base: Base
    most: int
    new: int
    logits: int = 0
    free: int = field(init=False)

    def __post_init__(self) -> None:
        device = self.base.device
        object.__setattr__(self, "free", int(SHARES.get(device.type, SHARE) * free_memory(device)))

    def rows(self, longest: int) -> int:
        """How many rows fit whose prompts have up to so many tokens: `most`, or as often its half as is needed."""
        rows = self.most
        if rows * (longest + self.new) <= SMALL * budget_and_overhead(self.base.device)[0]:
            return rows
        each = self.bytes(longest)
        while rows > 1 and rows * each > self.free:
            rows //= 2
        if rows < self.most:
            self._say(
                f"batches of answers have {rows} rows and not {self.most}, as {self.most} prompts of {longest} tokens "
                f"would take {self.most * each / 1e9:.1f} GB of memory; they keep to {self.free / 1e9:.1f} GB, a share "
                "of what is free"
            )
        return rows

    def bytes(self, length: int) -> int:
        """Of a row: reading a prompt of so many tokens, what is kept of it and of its answer, and logits."""
        up = -(-length // STEP) * STEP
        known = _measured.setdefault(self.base.model, {})
        if up not in known:
            known[up] = footprint.reading(self.base, up)
        reading = known[up]
        # What is kept grows by a copy of one layer at a time; logits are there as they are, in float32, and as losses.
        return length * reading.peak // up + self.new * reading.token + self.logits * 3 * reading.logits

    def _say(self, why: str) -> None:
        if self.base.model not in _said:
            _said.add(self.base.model)
            log.warning("%s", why)


def within(
    chosen: Sequence[int], run: Callable[[Sequence[int]], None], free: Callable[[], None] = lambda: None
) -> None:
    """`run` on all these places, or on parts of them, each half of those before, where the device's memory does not
    suffice.

    Args:
        free: as of `Attempts`.

    Raises:
        RunError: it does not suffice for one.
    """

    def in_parts(left: Sequence[int], size: int) -> Iterator[int]:
        for at in range(0, len(left), size):
            run(left[at : at + size])
            yield from left[at : at + size]

    in_turn(chosen, len(chosen), in_parts, free)


def in_turn(
    chosen: Sequence[int],
    most: int,
    run: Callable[[Sequence[int], int], Iterator[int]],
    free: Callable[[], None] = lambda: None,
) -> None:
    """`run` on these places, which yields those that are done, with at most so many at a time; on what is left again
    with half as many, where the device's memory does not suffice.

    Args:
        free: as of `Attempts`.

    Raises:
        RunError: it does not suffice for one.
    """
    left = dict.fromkeys(chosen)
    for attempt in Attempts(most, free):
        with attempt as size:
            if size < most:
                log.warning("memory did not suffice for so many answers at once; now %d rows at a time", size)
            for place in run(list(left), size):
                del left[place]
