"""Threads of one process take turns at models: one at a time loads, trains or answers, and a run that others wait for
passes its turn on after each round.

While transformers loads a model it changes what all threads share: torch's default dtype, torch's functions that draw
weights, and whether weights are tied. What another thread computes meanwhile could silently become something else.

A turn also gives its thread the settings of torch that all of this package counts on, whatever the program around it
has chosen, and gives that its own back in the end.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from llm_fed.basics.errors import printable

_SOON = 2.0  # seconds after which a thread that waits says so

Note = Callable[[str], None]


class Turns:
    """Which thread has the turn, and which wait for it, in their order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._owner: int | None = None  # the number of a thread
        self._depth = 0  # how often it has taken the turn
        self._within = 0  # threads that have taken a turn and not given it back, also those that have offered it
        self._dtype = torch.float32  # torch's default in the program around

    def take(self, note: Note) -> bool:
        """Whether the thread had no turn before. It waits for one behind those that wait already."""
        with self._changed:
            if self._owner == threading.get_ident():
                self._depth += 1
                return False
            self._wait(note)
            self._depth = 1
            if not self._within:
                self._dtype = torch.get_default_dtype()
            self._within += 1
            torch.set_default_dtype(torch.float32)
            return True

    def give_back(self, last: bool) -> None:
        """The opposite of `take`, which has returned `last`."""
        with self._changed:
            if self._owner == threading.get_ident():  # else it was interrupted while it waited to go on
                self._depth -= 1
                if not self._depth:
                    self._leave()
            self._within -= last
            if last and not self._within:
                torch.set_default_dtype(self._dtype)

    def offer(self, note: Note) -> None:
        """Let those who wait have their turns, where this thread has it, and then go on."""
        with self._changed:
            if self._owner == threading.get_ident() and self._waiting:
                depth = self._depth
                self._leave()
                self._wait(note)
                self._depth = depth

    def _leave(self) -> None:
        self._owner, self._depth = None, 0
        self._changed.notify_all()

    def _wait(self, note: Note) -> None:
        mine = object()
        self._waiting.append(mine)
        try:
            if not self._changed.wait_for(lambda: self._is_next(mine), _SOON):
                note("waiting for another thread of this process, which is loading, training or answering")
                self._changed.wait_for(lambda: self._is_next(mine))
            self._owner = threading.get_ident()
        finally:
            self._waiting.remove(mine)
            self._changed.notify_all()

    def _is_next(self, mine: object) -> bool:
        return self._owner is None and self._waiting[0] is mine


_turns = Turns()


def _print(text: str) -> None:
    print(f"llm-fed: {printable(text)}", file=sys.stderr)


@contextmanager
def taken(note: Note = _print) -> Iterator[None]:
    """Within, no other thread loads, trains or answers. A thread that has the turn may take it again. `note` is told
    where another thread has had the turn for two seconds."""
    first = _turns.take(note)
    try:
        with ExitStack() as usual:
            if first:
                usual.enter_context(torch.inference_mode(False))
                usual.enter_context(torch.enable_grad())
                if torch.get_default_device().type != "cpu":
                    usual.enter_context(torch.device("cpu"))
            yield
    finally:
        _turns.give_back(first)


def offer(note: Note = _print) -> None:
    """Between two rounds: other threads that wait have their turns first."""
    _turns.offer(note)
