"""Signs of life: the loops say how far they are to whoever listens, usually the reporter of a run; by default nobody.

A sign costs about a microsecond and waits for no device. Who listens is a context variable, so nothing of it passes
through methods, and a client's work in another thread of the same process is not taken for the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

CROSS = "the cross table"  # scores of personal models on the examples of other clients
FINISHING = "final step at the clients"  # what a method trains there after the last round


class Listener:
    """What is told of a run while it goes on; one by itself does nothing with it."""

    def round(self, number: int) -> None:
        """It begins; from 1 on."""

    def round_ended(self) -> None:
        """It is trained, scored and saved."""

    def begin(self, part: str) -> None:
        """A part of the work begins; parts do not overlap, but one may lie within another."""

    def end(self, part: str) -> None:
        """The innermost part ends."""

    def step(self, number: int, of: int, loss: float | None) -> None:
        """Optimizer step `number` of the `of` steps of a pass is done; the mean `loss` of its clients, where it could
        be read without waiting for the device."""

    def answered(self, amount: int) -> None:
        """So many prompts or pictures are, without training."""


NOBODY = Listener()
listener: ContextVar[Listener] = ContextVar("listener", default=NOBODY)


@contextmanager
def part(name: str) -> Iterator[None]:
    """Within, this part of the work is done."""
    told = listener.get()
    told.begin(name)
    try:
        yield
    finally:
        told.end(name)
