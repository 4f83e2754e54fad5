"""Pace: where a run is, and how long it will take by the rounds that this session has trained."""

from __future__ import annotations

import time
from collections.abc import Callable

from llm_fed.basics import signs

_WORDS = {  # parts of a round, and what is said of them
    "broadcast": "preparing the messages",
    "local": "training at the clients",
    "collect": "collecting the answers",
    "server": "the server's step",
    "evaluate": "scoring",
    "checkpoint": "writing the checkpoint",
    "test": "testing",
    signs.CROSS: "answering for the cross table",
}


class Pace:
    """Listens to a run. Other threads may read it at any time.

    A round will take as long as those of this session took on the mean, the current one included, so that an estimate
    grows while nothing is done. Nothing is known before the first has ended, or of what comes after the last.

    Attributes:
        number: of the round; 0 before the first.
        loss: the last one that is known.
        tested: whether the test has ended.
    """

    def __init__(self, rounds: int = 0, clock: Callable[[], float] = time.monotonic):
        self.rounds, self._clock = rounds, clock
        self.number, self.tested = 0, False
        self.loss: float | None = None
        self._parts: tuple[str, ...] = ()  # a tuple, as it may be read while it is changed
        self._inside = False  # a round
        self._ended = 0  # rounds of this session
        self._began = self._last = clock()  # the first of them, and when something was done last
        self._steps = self._expected = 0.0  # client steps of this round, and of the one before
        self._pass: tuple[int, int, float] | None = None  # step, of, client steps of the whole pass
        self._answers = 0.0  # of this part

    # What is told.

    def round(self, number: int) -> None:
        self.number, self._inside, self._steps, self._pass = number, True, 0.0, None
        if not self._ended:
            self._began = self._clock()

    def trained(self, loss: float | None) -> None:
        """The round has its line, and may still be scored and saved."""
        self._expected, self.loss, self._last = self._steps, loss, self._clock()

    def round_ended(self) -> None:
        self._inside = False
        self._ended += 1
        self._last = self._clock()

    def begin(self, part: str) -> None:
        self._parts, self._answers, self._pass = (*self._parts, part), 0.0, None

    def end(self, part: str) -> None:
        self._parts, self._answers, self._pass = self._parts[:-1], 0.0, None
        self.tested = self.tested or part == "test"

    def step(self, number: int, of: int, amount: float, total: float, loss: float | None) -> None:
        self._pass = number, of, total
        self._steps += amount
        self._last = self._clock()
        if loss is not None:
            self.loss = loss

    def answered(self, amount: float) -> None:
        self._answers, self._pass = self._answers + amount, None
        self._last = self._clock()

    # What is known.

    @property
    def done(self) -> float:
        """Rounds that are done, with the part of the current one that is, by the steps of the one before."""
        if not self._inside:
            return float(self.number)
        return self.number - 1 + (min(1.0, self._steps / self._expected) if self._expected else 0.0)

    def where(self) -> str:
        """What is being done, in words."""
        part, latest = ("", *self._parts)[-1], self._pass
        words = [f"round {self.number} of {self.rounds}"] if self._inside else []
        if latest is not None:
            words += [] if part in ("", "local") else [_WORDS.get(part, part)]
            words.append(self._steps_done(*latest))
            words += [] if self.loss is None else [f"loss {self.loss:.3f}"]
        elif part:
            words.append(_WORDS.get(part, part) + (f", {self._answers:.0f} answers" if self._answers else ""))
        return ", ".join(words)

    def left(self) -> str:
        """How long the rounds will take, in words: `about 14 min left`; empty where nothing is known yet, or none is
        left. Where nothing has been done since they were to end, this grows as the time goes on, and says so."""
        now = self._clock()
        seconds, expected = self._seconds_left(now), self._seconds_left(self._last)
        if not seconds:
            return ""
        late = now - self._last - expected
        left = f"about {duration(max(seconds, late))} left"
        return left + (f"; {duration(late)} later than expected" if late > 1 else "")

    def _seconds_left(self, now: float) -> float:
        """0.0 where that is not known."""
        done = self._ended + self.done - self.number + self._inside  # in this session
        return (now - self._began) / done * (self.rounds - self.done) if done else 0.0

    def _steps_done(self, number: int, of: int, total: float) -> str:
        if total >= max(self._expected, self._steps):  # all clients train in this pass
            return f"step {number} of {of}"
        expected = f" of {self._expected:.0f}" if self._expected >= self._steps else ""
        return f"{self._steps:.0f}{expected} client steps"


def duration(seconds: float) -> str:
    """In words, with the precision of an estimate: `40 s`, `14 min`, `3.5 h`, `2.1 days`."""
    if seconds < 9.5:
        return f"{max(1, round(seconds))} s"
    if seconds < 90:
        return f"{10 * round(seconds / 10)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    if seconds < 36 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
