"""Pace: where a run is, and how long it will take, from the times that this session measured and, as long as something
has not been seen, from a forecast."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from llm_fed.basics import signs
from llm_fed.runs.forecast import Forecast, duration

_REMEMBERED = 10  # rounds whose mean duration is expected of those to come

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
# What is done after the scores.
_ENDING = ("the weights of the experts", "writing the personal models", "writing the report")
_LAST = _ENDING[-1]


@dataclass(frozen=True)
class Ahead:
    """What a run will do.

    Attributes:
        steps: client steps expected in a round; 0 where nobody knows them before they are done.
        scored: the rounds that end with scores of `during`'s split.
        answers: by split, how many prompts or pictures are answered when it is scored.
        base_answers: how many the base answers in the whole run.
        final: client steps of the final step at the clients, after the last round.
        final_rounds: how many rounds' steps these are.
        forecast: what the parts will take, where it was estimated.
        elsewhere: whether the clients answer on other machines, so that nobody here knows how much.
        cross_answers: how many are answered for the cross table, beside the test.
        scores_after: whether `during`'s split is scored once more after the final step.
    """

    rounds: int = 0
    steps: Callable[[int], float] = lambda round: 0.0
    scored: Callable[[int], bool] = lambda round: False
    during: str = "validation"
    answers: Mapping[str, int] = field(default_factory=dict)
    base_answers: int = 0
    final: float = 0.0
    final_rounds: float = 0.0
    forecast: Forecast | None = None
    elsewhere: bool = False
    cross_answers: int = 0
    scores_after: bool = False

    def answers_after(self, reached: int) -> int:
        """How many are scored under personal models after a round, in the final test and the cross table, too."""
        rounds = sum(self.scored(round) for round in range(reached + 1, self.rounds + 1)) + self.scores_after
        return rounds * self.answers.get(self.during, 0) + self.answers.get("test", 0) + self.cross_answers

    def amounts(self, reached: int = 0) -> tuple[float, int, int]:
        """Rounds after this one, the final step among them, answers of personal models, and answers of the base."""
        return self.rounds - reached + self.final_rounds, self.answers_after(reached), self.base_answers

    def in_words(self, reached: int = 0) -> str:
        """How long all will take that follows a round; empty without a forecast."""
        if self.forecast is None:
            return ""
        return self.forecast.in_words(*self.amounts(reached))


@dataclass
class _Rate:
    """What one kind of work has taken in this session."""

    seconds: float = 0.0
    amount: float = 0.0

    def add(self, seconds: float, amount: float) -> None:
        self.seconds, self.amount = self.seconds + seconds, self.amount + amount

    def with_more(self, seconds: float, amount: float) -> float | None:
        """Seconds of one, what goes on now included; None before the first."""
        amount += self.amount
        return (self.seconds + seconds) / amount if amount else None


class Pace:
    """Listens to a run. Other threads may read it at any time.

    The time of a round, its scores apart, is expected to be the mean of the last ones; in the first round of a session
    it follows from the steps that are done. The time of scoring is proportional to the number of answers, and the base,
    which has not learned to stop, has a pace of its own.
    """

    def __init__(self, ahead: Ahead | None = None, clock: Callable[[], float] = time.monotonic):
        self.ahead, self._clock = ahead or Ahead(), clock
        self.number = 0  # of the round: 0 before the first
        self.loss: float | None = None  # the last one that is known
        self._parts: tuple[str, ...] = ()  # tuples, as they may be read while they are changed
        self._inside = False  # a round
        self._began = clock()  # the round, or before the first this session
        self._rounds: tuple[float, ...] = ()  # seconds of the last rounds, without their scores
        self._steps = self._expected = 0.0  # client steps of this round, done and in all
        self._pass: tuple[int, int, float] | None = None  # step, of, client steps of the whole pass
        self._final = 0.0  # client steps of the final step that are done
        self._finished = False  # it
        self._scoring = 0.0  # seconds in this round that went to scores
        self._scores, self._base = _Rate(), _Rate()  # answers of personal models, and of the base
        self._ended_seconds = 0.0  # that went to what is done after the scores
        self._ended = False
        self._scored = False  # this round
        self._tested = False
        self._crossed = False  # the cross table is made
        self._part_began = clock()
        self._answers = 0.0  # of the scores that are being made

    # What is told.

    def round(self, number: int) -> None:
        self.number, self._began, self._inside = number, self._clock(), True
        self._steps, self._scoring, self._scored, self._pass = 0.0, 0.0, False, None
        self._expected = self.ahead.steps(number)  # asked here alone: a schedule must not be asked by two threads

    def round_ended(self) -> None:
        self._rounds = (*self._rounds, self._clock() - self._began - self._scoring)[-_REMEMBERED:]
        self._inside = False

    def begin(self, part: str) -> None:
        self._parts = (*self._parts, part)
        self._part_began, self._answers, self._pass = self._clock(), 0.0, None

    def end(self, part: str) -> None:
        self._parts, self._pass, seconds = self._parts[:-1], None, self._of_part()
        if part in signs.SCORING:
            self._scoring += seconds
            if answers := self._expected_answers(part):
                self._scores.add(seconds, answers)
            self._scored = self._scored or part == "evaluate"
            self._tested = self._tested or part == "test"
            self._crossed = self._crossed or part == signs.CROSS
        elif part in signs.BASE:
            self._base.add(seconds, self._answers)
        elif part == signs.FINISHING:
            self._finished = True
        elif part in _ENDING:
            self._ended_seconds += seconds
            self._ended = self._ended or part == _LAST
        self._part_began, self._answers = self._clock(), 0.0

    def step(self, number: int, of: int, amount: float, total: float, loss: float | None) -> None:
        self._pass = number, of, total
        if signs.FINISHING in self._parts:
            self._final += amount
        else:
            self._steps += amount
        if loss is not None:
            self.loss = loss

    def answered(self, amount: float) -> None:
        self._answers += amount

    # What is known.

    @property
    def begun(self) -> bool:
        """Whether any of the work has been done from which a time can be estimated."""
        return bool(self._rounds or self._steps or self._scores.amount)

    @property
    def over(self) -> bool:
        """Whether all is done, as far as it was expected."""
        return self._tested and not self._part and (self._ended or self.ahead.forecast is None)

    @property
    def done(self) -> float:
        """Rounds that are done, with the part of the current one that is."""
        if not self._inside:
            return float(self.number)
        return self.number - 1 + (1.0 if self._part in ("server", *signs.SCORING, "checkpoint") else self._fraction())

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
        """How long it will take, in words: `about 14 min left`; empty where nothing is known yet."""
        if self.over or not self.ahead.rounds or (seconds := self.seconds_left) is None:
            return ""
        unknown = self.ahead.elsewhere or (self._answers_left() > 0 and self._per_answer() is None)
        return f"about {duration(seconds)} left" + (", scores not counted" if unknown else "")

    @property
    def seconds_left(self) -> float | None:
        """Of the whole run, scores as far as their pace is known; None where nothing is known yet."""
        training = self._training_left()
        if training is None:
            return None
        scores = self._answers_left() * (self._per_answer() or 0.0)
        base = self._base_left() * (self._per_base_answer() or 0.0)
        return training + self._final_left() + scores + base + self._ending_left()

    def _training_left(self) -> float | None:
        elapsed = self._clock() - self._began - self._scoring
        if self._part in signs.SCORING:
            elapsed -= self._of_part()
        after = self.ahead.rounds - self.number
        if not self._rounds:
            if self._inside and (fraction := self._fraction()):
                return elapsed / fraction * after + elapsed / fraction - elapsed
            if (
                after == 0
                and not self._inside
                and (self.ahead.forecast or self._final or self._per_answer() is not None)
            ):
                return 0.0
        if (usual := self._per_round()) is None:
            return None
        return usual * after + (max(0.0, usual - elapsed) if self._inside else 0.0)

    def _final_left(self) -> float:
        """Of the final step at the clients: by its own pace once it has begun, and before by that of the rounds."""
        latest = self._pass if self._part == signs.FINISHING and self._final > 0 else None
        total = max(self.ahead.final, latest[2] if latest else 0.0)
        if self._finished or self._tested or not total:
            return 0.0
        if latest:
            return max(0.0, self._of_part() / self._final * (total - self._final))
        return (self._per_round() or 0.0) * self.ahead.final_rounds

    @property
    def _part(self) -> str:
        parts = self._parts
        return parts[-1] if parts else ""

    def _fraction(self) -> float:
        """Of the round's steps, those that are done."""
        return min(1.0, self._steps / self._expected) if self._expected else 0.0

    def _steps_done(self, number: int, of: int, total: float) -> str:
        expected = self._expected if self._part == "local" else 0.0
        if total >= expected:  # all clients train in this pass
            return f"step {number} of {of}"
        return f"{self._steps:.0f} of {max(expected, self._steps):.0f} client steps"

    def _answers_done(self) -> str:
        if self._part not in signs.SCORING or not self._answers:
            return ""
        expected = self._expected_answers(self._part)
        return f" {min(self._answers, expected):.0f} of {expected} answers"

    def _expected_answers(self, part: str) -> int:
        if part == signs.CROSS:
            return self.ahead.cross_answers
        return self.ahead.answers.get("test" if part == "test" else self.ahead.during, 0)

    def _of_part(self) -> float:
        """Seconds of the innermost part so far."""
        return self._clock() - self._part_began

    def _per_round(self) -> float | None:
        """Seconds of a round without its scores, the mean of the last ones; before the first, as was forecast."""
        if rounds := self._rounds:
            return sum(rounds) / len(rounds)
        return self.ahead.forecast.round.middle if self.ahead.forecast else None

    def _per_answer(self) -> float | None:
        expected = self.ahead.forecast.answer.middle if self.ahead.forecast else None
        return self._measured(self._scores, signs.SCORING) or expected

    def _per_base_answer(self) -> float | None:
        expected = self.ahead.forecast.base_answer.middle if self.ahead.forecast else self._per_answer()
        return self._measured(self._base, signs.BASE) or expected

    def _measured(self, rate: _Rate, parts: Collection[str]) -> float | None:
        """Seconds per answer in these parts, the one included that goes on; None before the first answer."""
        now = (self._of_part(), self._answers) if self._part in parts and self._answers else (0.0, 0.0)
        return rate.with_more(*now)

    def _base_left(self) -> float:
        """Answers of the base; after the test none, whatever was expected."""
        now = self._answers if self._part in signs.BASE else 0.0
        left = self.ahead.base_answers - self._base.amount - now
        return 0.0 if self._tested and self._part not in signs.BASE else max(0.0, left)

    def _ending_left(self) -> float:
        if self.ahead.forecast is None or self._ended:
            return 0.0
        now = self._of_part() if self._part in _ENDING else 0.0
        return max(0.0, self.ahead.forecast.ending.middle - self._ended_seconds - now)

    def _answers_left(self) -> float:
        ahead = self.ahead
        first = self.number + (1 if not self._inside or self._scored else 0)
        rounds = sum(ahead.scored(round) for round in range(max(1, first), ahead.rounds + 1))
        left = (rounds + (ahead.scores_after and not self._tested)) * ahead.answers.get(ahead.during, 0)
        left += 0 if self._tested else ahead.answers.get("test", 0)
        left += 0 if self._crossed or self._ended else ahead.cross_answers
        return max(0.0, left - (self._answers if self._part in signs.SCORING else 0.0))
