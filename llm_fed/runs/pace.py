"""Pace: where a run is, and how long it will take by what this session has measured of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
_ROUNDS, _SCORES, _BASE = "rounds", "scores", "base"  # kinds of work, each with its own pace
_KINDS = {**dict.fromkeys(signs.SCORING, _SCORES), **dict.fromkeys(signs.BASE, _BASE)}
_TRAINED = frozenset({"server", "evaluate", "checkpoint"})  # parts of a round in which no client trains any more


@dataclass(frozen=True)
class Ahead:
    """What a run will do.

    Attributes:
        steps: client steps expected in a round; 0 where they are not known before they are done.
        scored: the rounds that end with scores.
        answers: by part (`evaluate`, `test`, ...), how many prompts or pictures are answered in it.
        base: how many the base answers in the whole run.
        finishes: whether clients may train after the last round, for a time that nobody knows before.
        elsewhere: whether clients answer on other machines, so that the number of their answers is not known.
    """

    rounds: int = 0
    steps: Callable[[int], float] = lambda round: 0.0
    scored: Callable[[int], bool] = lambda round: False
    answers: Mapping[str, int] = field(default_factory=dict)
    base: int = 0
    finishes: bool = False
    elsewhere: bool = False


class Pace:
    """Listens to a run. Other threads may read it at any time.

    Rounds, answers of personal models and answers of the base, which has not learned to stop, each have a pace: the
    seconds of this session that went to them, the current ones included, over what is done of them. So an estimate
    grows while nothing is done. A part that nobody has done yet has no pace, and is named as not counted.
    """

    def __init__(self, ahead: Ahead | None = None, clock: Callable[[], float] = time.monotonic):
        self.ahead, self._clock = ahead or Ahead(), clock
        self.number = 0  # of the round: 0 before the first
        self.loss: float | None = None  # the last one that is known
        self._parts: tuple[str, ...] = ()  # a tuple, as it may be read while it is changed
        self._inside = False  # a round
        self._over: frozenset[str] = frozenset()  # parts that have ended since the current or last round began
        self._seconds = {_ROUNDS: 0.0, _SCORES: 0.0, _BASE: 0.0, signs.FINISHING: 0.0, "": 0.0}
        self._amounts = {_ROUNDS: 0.0, _SCORES: 0.0, _BASE: 0.0, signs.FINISHING: 0.0}
        self._since = clock()  # when the current kind of work began
        self._steps = self._expected = 0.0  # client steps of this round, done and in all
        self._pass: tuple[int, int, float] | None = None  # step, of, client steps of the whole pass
        self._answers = 0.0  # of this part
        self._last = self._since  # when something was done last

    # What is told.

    def round(self, number: int) -> None:
        self._charge()
        self.number, self._inside = number, True
        self._steps, self._pass, self._over = 0.0, None, frozenset()
        self._expected = self.ahead.steps(number)  # asked here alone: a schedule must not be asked by two threads

    def round_ended(self) -> None:
        self._charge()
        self._amounts[_ROUNDS] += 1
        self._inside = False
        self._last = self._clock()

    def begin(self, part: str) -> None:
        self._charge()
        self._parts, self._answers, self._pass = (*self._parts, part), 0.0, None

    def end(self, part: str) -> None:
        self._charge()
        self._parts, self._pass, self._over = self._parts[:-1], None, self._over | {part}
        self._answers = 0.0

    def step(self, number: int, of: int, amount: float, total: float, loss: float | None) -> None:
        self._pass = number, of, total
        if self._kind == signs.FINISHING:
            self._amounts[signs.FINISHING] += amount
        else:
            self._steps += amount
        if loss is not None:
            self.loss = loss
        self._last = self._clock()

    def answered(self, amount: float) -> None:
        self._answers += amount
        if (kind := self._kind) in (_SCORES, _BASE):
            self._amounts[kind] += amount
            self._last = self._clock()

    def _charge(self) -> None:
        now = self._clock()
        self._seconds[self._kind] += now - self._since
        self._since = now

    # What is known.

    @property
    def begun(self) -> bool:
        """Whether any of the work has been done from which a time can be estimated."""
        return self.seconds_left is not None

    @property
    def over(self) -> bool:
        """Whether all is done, as far as it was expected."""
        return "test" in self._over and not self._parts

    @property
    def done(self) -> float:
        """Rounds that are done, with the part of the current one that is."""
        return self.number - 1 + self._fraction() if self._inside else float(self.number)

    def where(self) -> str:
        """What is being done, in words."""
        part, latest = self._part, self._pass
        words = [f"round {self.number} of {self.ahead.rounds}"] if self._inside else []
        if latest is not None and part not in signs.SCORING:
            words += [] if part in ("", "local") else [_WORDS.get(part, part)]
            words.append(self._steps_done(*latest))
            words += [] if self.loss is None else [f"loss {self.loss:.3f}"]
        elif part:
            words.append(_WORDS.get(part, part) + self._answers_done())
        return ", ".join(words)

    def left(self) -> str:
        """How long it will take, in words: `about 14 min left`; empty where nothing is known yet.

        Where nothing has been done since the run was expected to end, this grows as the time goes on, and says so.
        """
        now = self._clock()
        seconds, expected = self._seconds_left(now), self._seconds_left(self._last)
        if self.over or seconds is None or expected is None:
            return ""
        late = now - self._last - expected
        unknown = " and ".join(self._unknown())
        left = f"about {duration(max(seconds, late))} left" + (f", {unknown} not counted" if unknown else "")
        return left + (f"; {duration(late)} later than expected" if late > 1 else "")

    @property
    def seconds_left(self) -> float | None:
        """Of the whole run, as far as the pace of its parts is known; None where nothing is known yet."""
        return self._seconds_left(self._clock())

    def _seconds_left(self, now: float) -> float | None:
        left = {_ROUNDS: self.ahead.rounds - self.done, _SCORES: self._scores_left(), _BASE: self._base_left(),
                signs.FINISHING: self._final_left()}  # fmt: skip
        paces = {kind: self._per_one(kind, now) for kind in left}
        if not self.ahead.rounds or all(pace is None for pace in paces.values()):
            return None
        return sum(amount * (paces[kind] or 0.0) for kind, amount in left.items())

    @property
    def _part(self) -> str:
        return ("", *self._parts)[-1]

    @property
    def _kind(self) -> str:
        """Of the work that goes on."""
        part = self._part
        return signs.FINISHING if signs.FINISHING in self._parts else _KINDS.get(part, _ROUNDS if self._inside else "")

    def _per_one(self, kind: str, now: float) -> float | None:
        """Seconds of a round, or of an answer; None before any of it is done."""
        amount = self._amounts[kind] + (self._fraction() if kind == _ROUNDS and self._inside else 0.0)
        current = max(0.0, now - self._since) if self._kind == kind else 0.0
        return (self._seconds[kind] + current) / amount if amount else None

    def _fraction(self) -> float:
        """Of this round, what is done."""
        if {self._part, *self._over} & _TRAINED:
            return 1.0
        return min(1.0, self._steps / self._expected) if self._expected else 0.0

    def _unknown(self) -> list[str]:
        scores = self.ahead.elsewhere or (self._scores_left() > 0 and not self._amounts[_SCORES])
        final = self.ahead.finishes and not self._final_left() and signs.FINISHING not in self._over
        return ["scores"] * scores + ["the final step"] * final

    def _steps_done(self, number: int, of: int, total: float) -> str:
        expected = self._expected if self._part == "local" else 0.0
        if total >= expected:  # all clients train in this pass
            return f"step {number} of {of}"
        return f"{self._steps:.0f} of {max(expected, self._steps):.0f} client steps"

    def _answers_done(self) -> str:
        expected = self.ahead.answers.get(self._part, 0)
        return f" {min(self._answers, expected):.0f} of {expected} answers" if expected and self._answers else ""

    def _scores_left(self) -> float:
        ahead = self.ahead
        first = self.number + (not self._inside or "evaluate" in self._over)
        rounds = sum(ahead.scored(round) for round in range(max(1, first), ahead.rounds + 1))
        times = {part: int(part not in self._over) for part in ahead.answers} | {"evaluate": rounds}
        left = sum(times[part] * number for part, number in ahead.answers.items())
        return max(0.0, left - (self._answers if self._kind == _SCORES else 0.0))

    def _base_left(self) -> float:
        """After the test none, whatever was expected."""
        tested = "test" in self._over and self._kind != _BASE
        return 0.0 if tested else max(0.0, self.ahead.base - self._amounts[_BASE])

    def _final_left(self) -> float:
        done = self._amounts[signs.FINISHING]
        return max(0.0, self._pass[2] - done) if self._kind == signs.FINISHING and self._pass else 0.0


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
