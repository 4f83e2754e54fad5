"""What was to be reached on a GPU, and what the lines of results say of it.

A goal is of a figure of one case, or of its ratio to the same figure of another case. Of a case as a run has it and the
same with all replayed, the first counts where both were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lines import Line
from steps import AGAIN, ALONE, AS_MANY, DENSE, LARGE, PEFT, SMALL, WIDE

NOT_RUN = "not run"


@dataclass(frozen=True)
class Goal:
    """What was to be reached.

    Attributes:
        what: in words.
        bound: the least that is wanted, or the most.
        cases: whose figure it is; of two, the first one's over the second one's.
        key: of the figure.
        least: whether the bound is the least.
        times: what the second one is multiplied by, where it measured a part.
    """

    what: str
    bound: float
    cases: tuple[str, ...]
    key: str = "seconds"
    step: str = "training"
    least: bool = False
    times: float = 1.0

    def measured(self, lines: Sequence[Line]) -> tuple[float | None, bool]:
        """The figure, on the card where all of its cases were measured last, and whether all was replayed in one of
        them; None where there is no such card."""
        for card in reversed(dict.fromkeys(line.card for line in lines)):
            its = {
                line.case: line.figure
                for line in lines
                if (line.card, line.step) == (card, self.step) and line.is_measured and self.key in line.figure
            }
            found = [next((case for case in (case, f"{case}, {AGAIN}") if case in its), None) for case in self.cases]
            if None not in found:
                values = [float(its[str(case)][self.key]) for case in found]
                again = any(str(case).endswith(AGAIN) for case in found)
                return (values[0] / (self.times * values[1]) if len(values) > 1 else values[0]), again
        return None, False


GOALS = (
    Goal("3B, 8 clients, useful tokens/s", 30_000, (f"{LARGE}, 8 clients",), "tokens_per_second", least=True),
    Goal(
        "3B, 8 clients, seconds over those of one adapter on as many tokens in dense rows", 1.3,
        (f"{LARGE}, 8 clients", f"{LARGE}, 8 clients, {DENSE}"),
    ),
    *(
        Goal(f"3B, {n} clients, useful tokens/s", 38_000, (f"{LARGE}, {n} clients",), "tokens_per_second", least=True)
        for n in (32, 100)
    ),
    Goal("135M, 8 clients, 20 steps, seconds", 0.3, (f"{SMALL}, 8 clients, 20 steps",)),
    *(
        Goal(
            f"{name}, 8 clients, times as quick as stock PEFT, one after another", bound,
            (f"{base}, 8 clients, {PEFT}", f"{base}, 8 clients"), least=True,
        )
        for name, base, bound in (("3B", LARGE, 9), ("135M", SMALL, 20))
    ),
    *(
        Goal(
            f"{name}, 8 clients, seconds over those of one after another, captured and fused", 0.85,
            (f"{base}, 8 clients", f"{base}, 8 clients, {ALONE}"),
        )
        for name, base in (("3B", LARGE), ("135M", SMALL))
    ),
    Goal(
        "3B, seconds of 100 clients over those of 8 with as many tokens", 1.1,
        (f"{LARGE}, 100 clients", f"{LARGE}, 8 clients, {AS_MANY}"),
    ),
    Goal(
        "3B, 8 clients, memory over that of one adapter on as many tokens, with graphs and pools", 1.1,
        (f"{LARGE}, 8 clients", f"{LARGE}, 8 clients, {DENSE}"), "reserved_gib",
    ),
    Goal(
        "8B, all-linear r = 16, useful tokens/s", 13_000, (f"llama-3.1-8b, 8 clients, {WIDE}",), "tokens_per_second",
        least=True,
    ),
    Goal("135M, 1,040 answers, seconds", 2.5, (f"{SMALL}, ours",), step="generation"),
    Goal(
        "135M, times as quick as `generate`, one client (130 answers) after another", 4,
        (f"{SMALL}, `generate`, one client after another", f"{SMALL}, ours"), step="generation", least=True,
        times=1 / 8,
    ),
    Goal("135M, seconds from start to first round, a local base", 8, ("fedit",), "first_round", step="real_base"),
    Goal(
        "135M, five methods by ten draws, seconds: the start, and ten times one draw", 600, ("five methods",), "all",
        step="comparison",
    ),
)  # fmt: skip


def table(lines: Sequence[Line]) -> str:
    """A row per goal."""
    rows = ["| what | goal | measured | |", "|---|---:|---:|---|"]
    for goal in GOALS:
        value, again = goal.measured(lines)
        sign = "at least" if goal.least else "at most"
        rows.append(f"| {goal.what} | {sign} {goal.bound:,} | {shown(value)} | {verdict(goal, value, again)} |")
    return "\n".join(rows)


def shown(value: float | None) -> str:
    """Three digits of it."""
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def verdict(goal: Goal, value: float | None, again: bool) -> str:
    """In words."""
    if value is None:
        return NOT_RUN
    reached = value >= goal.bound if goal.least else value <= goal.bound
    return f"{'reached' if reached else 'missed'}{f', {AGAIN}' if again else ''}"
