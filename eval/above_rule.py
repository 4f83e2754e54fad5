"""Which methods are shown to be above `rule`, the best rule that trains nothing (`rules.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from llm_fed.eval.pairs import LEAST, MethodPair, Scores, compare_with


@dataclass(frozen=True)
class AboveRule:
    """How the methods stand to `rule` in one quantity (the average over the clients, say)."""

    pairs: Mapping[str, MethodPair]  # by method the comparison with its rule
    means: Mapping[str, tuple[float, float]]  # its mean and that of its rule, over the draws that have both

    @property
    def above(self) -> list[str]:
        return [name for name, pair in self.pairs.items() if pair.claim == "greater" and pair.first == name]

    @property
    def below(self) -> list[str]:
        return [name for name, pair in self.pairs.items() if pair.claim == "greater" and pair.second == name]

    @property
    def sentences(self) -> list[str]:
        """What a reader must know, the worst first."""
        said = []
        if all(own < rule for own, rule in self.means.values()):
            own, rule = (fmean(values) for values in zip(*self.means.values(), strict=True))
            best = max(own for own, _ in self.means.values())
            said.append(
                f"every method is below rule, which trains nothing: at most {best:.1f} against {rule:.1f}"
                if len(self.pairs) > 1
                else f"{next(iter(self.pairs))} is below rule, which trains nothing: {own:.1f} against {rule:.1f}"
            )
        shown = {"above": self.above, "below": self.below}
        parts = [f"{_are(names)} shown to be {where} rule" for where, names in shown.items() if names]
        if rest := [name for name in self.pairs if name not in (*self.above, *self.below)]:
            few = max(self.pairs[name].draws for name in rest) < LEAST
            needed = f" (at least {LEAST} draws are needed)" if few else ""
            parts.append(f"{_are(rest)} not shown to be above rule{needed}")
        return [*said, "; ".join(parts)]

    def as_json(self) -> dict[str, Any]:
        pairs = {name: pair.as_json() for name, pair in self.pairs.items()}
        return {"above": self.above, "below": self.below, "pairs": pairs, "sentences": self.sentences}


def above_rule(methods: Scores, rules: Scores) -> AboveRule | None:
    """The methods against their rules, by method and cell; None where no method has a rule in one of its draws."""
    pairs = compare_with(methods, rules, "rule")
    means = {}
    for name in pairs:
        cells = methods[name].keys() & rules[name].keys()
        means[name] = fmean(methods[name][cell] for cell in cells), fmean(rules[name][cell] for cell in cells)
    return AboveRule(pairs, means) if pairs else None


def _are(names: Sequence[str]) -> str:
    """`fedit is`, or `fedit, fedmerge and local are`."""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"
