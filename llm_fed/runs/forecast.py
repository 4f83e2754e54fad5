"""Forecast: how long a run will take, before its first step."""

from __future__ import annotations

from dataclasses import dataclass

CLEAR = 1.25  # a longest time that is at most so many times the shortest is said as one number


@dataclass(frozen=True)
class Span:
    """Seconds, between the shortest and the longest that are likely."""

    low: float = 0.0
    high: float = 0.0

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def __add__(self, other: Span) -> Span:
        return Span(self.low + other.low, self.high + other.high)

    def __mul__(self, times: float) -> Span:
        return Span(self.low * times, self.high * times)

    def __truediv__(self, parts: float) -> Span:
        return self * (1 / parts)

    def __str__(self) -> str:
        """`14 min`, or `10 to 20 min`."""
        if self.high <= CLEAR * self.low or duration(self.low) == duration(self.high):
            return duration(self.middle)
        low, high = duration(self.low), duration(self.high)
        same = low.rpartition(" ")[2] == high.rpartition(" ")[2]
        return f"{low.rpartition(' ')[0] if same else low} to {high}"


@dataclass(frozen=True)
class Forecast:
    """What the parts of a run are expected to take, in seconds, each once.

    Attributes:
        round: training at the clients in one round.
        answer: one prompt or picture that is scored, under a personal model.
        base_answer: the same without an adapter: the base has not learned to stop.
        ending: personal models and the report.
        remark: what makes it longer than it need be, in words.
    """

    round: Span
    answer: Span = Span()
    base_answer: Span = Span()
    ending: Span = Span()
    remark: str = ""

    def whole(self, rounds: float, answers: int, base_answers: int) -> Span:
        """The time of so many rounds and answers, and of the end."""
        return self.round * rounds + self.answer * answers + self.base_answer * base_answers + self.ending

    def in_words(self, rounds: float, answers: int, base_answers: int) -> str:
        """`about 12 min: training 8 min, scoring 4 min, export and report 5 s`."""
        scoring = self.answer * answers + self.base_answer * base_answers
        parts = {"training": self.round * rounds, "scoring": scoring, "export and report": self.ending}
        said = ", ".join(f"{name} {span}" for name, span in parts.items() if span.high > 0)
        remark = f"; {self.remark}" if self.remark else ""
        return f"about {self.whole(rounds, answers, base_answers)}: {said}{remark}"


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
