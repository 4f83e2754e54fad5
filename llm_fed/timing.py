"""Watch: seconds per part of a round, for timing.jsonl; whoever listens for signs of life is told of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llm_fed import signs


class Watch:
    """Times one round from its making on, and what is within `with watch("part"):`."""

    def __init__(self, round: int) -> None:
        signs.round(round)
        self._parts: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        with signs.part(part):
            yield
        self._parts[part] = round(time.perf_counter() - start, 4)

    def record(self) -> dict[str, Any]:
        """Seconds of the round so far, and of each part."""
        signs.round_ended()
        return {"seconds": round(time.perf_counter() - self._start, 4), "parts": self._parts}
