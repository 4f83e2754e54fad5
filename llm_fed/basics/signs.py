"""Signs of life: the loops say how far they are to whoever listens, usually the reporter of a run; by default nobody.

A sign costs about a microsecond and waits for no device. Who listens is a context variable, so nothing of it passes
through methods, and a client's work in another thread of the same process is not taken for the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

CROSS = "the cross table"  # scores of personal models on the examples of other clients
FINISHING = "final step at the clients"  # what a method trains there after the last round


class Listener(Protocol):
    """What is told of a run while it goes on."""

    def round(self, number: int) -> None: ...  # it begins; from 1 on

    def round_ended(self) -> None: ...

    # A part of the work; parts do not overlap, but one may lie within another.
    def begin(self, part: str) -> None: ...

    def end(self, part: str) -> None: ...

    def step(self, number: int, of: int, loss: float | None) -> None:
        """Optimizer step `number` of the `of` steps of a pass is done; the mean `loss` of its clients, where it could
        be read without waiting for the device."""

    def answered(self, amount: int) -> None: ...  # so many prompts or pictures, without training


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Within, `listener` is told; None: nobody."""
    before = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(before)


def round(number: int) -> None:
    if listener := _listener.get():
        listener.round(number)


def round_ended() -> None:
    if listener := _listener.get():
        listener.round_ended()


@contextmanager
def part(name: str) -> Iterator[None]:
    listener = _listener.get()
    if listener is None:
        yield
        return
    listener.begin(name)
    try:
        yield
    finally:
        listener.end(name)


def step(number: int, of: int, loss: float | None) -> None:
    """See `Listener.step`."""
    if listener := _listener.get():
        listener.step(number, of, loss)


def answered(amount: int) -> None:
    if listener := _listener.get():
        listener.answered(amount)
