"""Signs of life: the loops say how far they are to whoever listens, usually the reporter of a run. By default nobody
does.

A sign costs about a microsecond and waits for no device. Who listens is a context variable, so nothing of it passes
through methods, and a client's work in another thread of the same process is not taken for the server's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

SCORING = ("evaluate", "test")  # the parts in which clients are scored
FINISHING = "final step at the clients"  # what a method trains there after the last round
BASE = ("testing the base", "the base's answers to the samples")  # those in which the base answers


class Listener(Protocol):
    """What is told of a run while it goes on."""

    def round(self, number: int) -> None:
        """Round `number` (1, 2, ...) begins."""
        ...

    def round_ended(self) -> None: ...

    def begin(self, part: str) -> None:
        """A part of the work begins; parts do not overlap, but one may lie within another."""
        ...

    def end(self, part: str) -> None: ...

    def step(self, number: int, of: int, amount: float, total: float, loss: float | None) -> None:
        """Optimizer step `number` of the `of` steps of a pass is done.

        Args:
            amount: how many clients took it.
            total: the client steps of the whole pass.
            loss: their mean loss, where it could be read without waiting for the device.
        """
        ...

    def answered(self, amount: float) -> None:
        """So many prompts or pictures have been answered without training."""
        ...


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Within, `listener` is told."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def unheard() -> Iterator[None]:
    """Within, nobody is told."""
    token = _listener.set(None)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def standing_for(times: float) -> Iterator[None]:
    """Within, all work counts so many times: it is this process's share of what several do side by side."""
    listener = _listener.get()
    if listener is None or times == 1:
        yield
        return
    with heard_by(_Scaled(listener, times)):
        yield


def round(number: int) -> None:
    if listener := _listener.get():
        listener.round(number)


def round_ended() -> None:
    if listener := _listener.get():
        listener.round_ended()


@contextmanager
def part(name: str) -> Iterator[None]:
    """What is done within is this part of the work."""
    listener = _listener.get()
    if listener is None:
        yield
        return
    listener.begin(name)
    try:
        yield
    finally:
        listener.end(name)


def step(number: int, of: int, amount: int = 1, total: int | None = None, loss: float | None = None) -> None:
    """See `Listener.step`; `total` is by default that of one client alone."""
    if listener := _listener.get():
        listener.step(number, of, amount, of if total is None else total, loss)


def answered(amount: int) -> None:
    if listener := _listener.get():
        listener.answered(amount)


@dataclass(frozen=True)
class _Scaled:
    """Passes on what it is told, with amounts `times` as large."""

    listener: Listener
    times: float

    def round(self, number: int) -> None:
        self.listener.round(number)

    def round_ended(self) -> None:
        self.listener.round_ended()

    def begin(self, part: str) -> None:
        self.listener.begin(part)

    def end(self, part: str) -> None:
        self.listener.end(part)

    def step(self, number: int, of: int, amount: float, total: float, loss: float | None) -> None:
        self.listener.step(number, of, amount * self.times, total * self.times, loss)

    def answered(self, amount: float) -> None:
        self.listener.answered(amount * self.times)
