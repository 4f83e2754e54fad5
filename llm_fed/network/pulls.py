"""Pulls: many slow look-ups side by side, so that one that hangs holds up nobody else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

_SIDE_BY_SIDE = 64  # look-ups at once, beside those that have hung for PATIENCE
PATIENCE = 2.0  # seconds that `look` waits for look-ups that have begun
_KEPT = 600.0  # seconds that something found is kept for whoever asks for it no more


class Pulls:
    """Looks things up by their ids, each in a thread that ends with the process.

    Args:
        pull: of an id what there is, or None where there is nothing yet. What it raises is raised by `look`.
    """

    def __init__(self, pull: Callable[[str], Any]):
        self._pull = pull
        self._done: queue.SimpleQueue[tuple[str, Any, BaseException | None]] = queue.SimpleQueue()
        self._since: dict[str, float] = {}  # by id that is being looked up, when that began
        self._results: dict[str, tuple[Any, float]] = {}  # what nobody has requested yet, and when it came

    def look(self, ids: Collection[str]) -> dict[str, Any]:
        """What there is of these by now, each given out once; returns within PATIENCE, or little more."""
        until = time.monotonic() + PATIENCE
        for id in [id for id in ids if id not in self._since and id not in self._results]:
            while self._running(until - PATIENCE) >= _SIDE_BY_SIDE and time.monotonic() < until:
                self._take(0.05)
            if time.monotonic() >= until:
                break  # the others at the next look
            self._since[id] = time.monotonic()
            threading.Thread(target=self._look_up, args=[id], daemon=True).start()
        while any(id in self._since for id in ids) and time.monotonic() < until:
            self._take(0.05)
        now = time.monotonic()
        self._results = {id: pair for id, pair in self._results.items() if id in ids or now - pair[1] < _KEPT}
        return {id: self._results.pop(id)[0] for id in [*ids] if id in self._results}

    def _running(self, since: float) -> int:
        """How many began then or later."""
        return sum(began >= since for began in self._since.values())

    def _look_up(self, id: str) -> None:
        try:
            self._done.put((id, self._pull(id), None))
        except BaseException as error:
            self._done.put((id, None, error))

    def _take(self, seconds: float) -> None:
        """Take in what comes within so many seconds, at most one."""
        try:
            id, result, error = self._done.get(timeout=seconds)
        except queue.Empty:
            return
        self._since.pop(id, None)
        if error is not None:
            raise error
        if result is not None:
            self._results[id] = result, time.monotonic()
