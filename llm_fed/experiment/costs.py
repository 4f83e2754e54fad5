"""What a run will cost: bytes that travel, memory and whether it suffices, disk; as numbers and in words."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from llm_fed.basics.errors import UserError


@dataclass(frozen=True)
class CountSummary:
    """Numbers of several clients."""

    total: int = 0
    least: int = 0
    most: int = 0

    @classmethod
    def of(cls, numbers: Iterable[int]) -> CountSummary:
        counts = list(numbers)
        return cls(sum(counts), min(counts), max(counts)) if counts else cls()

    def each(self) -> str:
        """`16`, or `3 to 120`."""
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class Costs:
    """What a run will move and hold, in bytes.

    Attributes:
        down, up: of what one client is sent in round 1, and of its answer.
        down_run, up_run: over the whole run, if each client moves in every round what it moves in the first.
        base: the weights of the base and of clients' own models.
        step: what a training step of the clients that train at once takes beside it, by a measured step; None where no
            client trains here.
        memory_free: on the device, with the base loaded.
        memory_limit: what allows no more, where the machine has more: a container's or a job's limit.
        smaller: settings that would make less of it necessary.
        state: the server's part of a checkpoint.
        disk_free: where the run folder is, or will be.
    """

    down: CountSummary
    up: CountSummary
    down_run: int
    up_run: int
    base: int
    step: int | None
    memory_free: int
    smaller: tuple[str, ...]
    state: int
    disk_free: int
    memory_limit: str = ""

    def rows(self, several: bool = False) -> dict[str, str]:
        """Lines for people, by their label.

        Args:
            several: whether messages are those of more than one run.
        """
        rows = {"messages": self._messages(several), "memory": self._memory()}
        if self.step is not None:
            rows["fits"] = f"yes, about {describe(self.memory_free - self.step)} would be left"
        within = f"; limited by {self.memory_limit}" if self.memory_limit else ""
        memory = f"{describe(self.memory_free)} of memory (with the base loaded{within})"
        free = f"{memory}, {describe(self.disk_free)} of disk"
        return {**rows, "disk": f"{describe(self.state)} per checkpoint for the server's state", "free": free}

    def _messages(self, several: bool) -> str:
        if not self.down_run and not self.up_run:
            return "nothing is sent"
        each = f"a client receives {self.down.each()} bytes and sends {self.up.each()} in round 1; "
        whole = f"about {describe(self.down_run)} down and {describe(self.up_run)} up in the whole run"
        return whole if several else each + whole

    def _memory(self) -> str:
        if self.step is None:
            return f"{describe(self.base)} for the base"
        return (
            f"about {describe(self.base + self.step)} to train: base {describe(self.base)}, and a training step "
            f"{describe(self.step)} (measured); scoring is not included"
        )

    def check(self) -> None:
        """Refuse what does not fit: a CPU has no error for want of memory, it kills.

        Raises:
            UserError: what is too large, and settings that need less.
        """
        if self.step is not None and self.step > self.memory_free:
            change = f"; these settings need less: {', '.join(self.smaller)}" if self.smaller else ""
            raise UserError(
                f"a training step takes about {describe(self.step)} of memory beside the base, and "
                f"{describe(self.memory_free)} are free{change}"
            )


def describe(number: float) -> str:
    """Bytes, in the unit that suits them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"
