"""Which methods are shown to be above `rule`, the best rule that trains nothing (`rules.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_fed.eval.pairs import MethodPair, Scores, compare_with
from llm_fed.eval.variance import LEAST, Design

SHARE = 0.01  # of what all intervals together may miss: a rule is seldom near, and pairs need the rest


@dataclass(frozen=True)
class AboveRule:
    """How the methods stand to `rule`."""

    pairs: Mapping[str, MethodPair]  # by method the comparison with its rule

    @property
    def above(self) -> list[str]:
        return [name for name, pair in self.pairs.items() if pair.claim == "greater" and pair.first == name]

    @property
    def below(self) -> list[str]:
        return [name for name, pair in self.pairs.items() if pair.claim == "greater" and pair.second == name]

    @property
    def sentence(self) -> str:
        """What is shown; of too few draws nothing, and then the differences are no more than observed."""
        most = max(pair.draws for pair in self.pairs.values())
        if most < LEAST:
            seen = [f"{name} by {_signed(name, pair)}" for name, pair in self.pairs.items()]
            draws = f"{most} draw" + ("s" if most > 1 else "")
            return f"against rule, which trains nothing: cannot be known from {draws} (observed: {', '.join(seen)})"
        shown = {"above": self.above, "below": self.below}
        parts = [f"{_are(names)} shown to be {where} rule" for where, names in shown.items() if names]
        if rest := [name for name in self.pairs if name not in (*self.above, *self.below)]:
            parts.append(f"{_are(rest)} not shown to be above rule")
        return "; ".join(parts)

    def as_json(self) -> dict[str, Any]:
        pairs = {name: pair.as_json() for name, pair in self.pairs.items()}
        return {"above": self.above, "below": self.below, "pairs": pairs, "sentences": [self.sentence]}


def above_rule(methods: Scores, rules: Scores, design: Design) -> AboveRule | None:
    """The methods against their rules; None where no method has a rule in one of its draws."""
    pairs = compare_with(methods, rules, "rule", design, 1 - SHARE)
    return AboveRule(pairs) if pairs else None


def _signed(name: str, pair: MethodPair) -> str:
    sign = 1 if pair.first == name else -1
    return f"{sign * (pair.difference or 0.0):+.1f}"


def _are(names: Sequence[str]) -> str:
    """`fedit is`, or `fedit, fedmerge and local are`."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"
