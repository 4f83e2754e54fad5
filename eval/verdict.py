"""What a comparison knows of its runs: the verdict on each pair of methods by four quantities, and who is best if
anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from llm_fed.eval.above_rule import AboveRule, above_rule
from llm_fed.eval.pairs import LEAST, LEVEL, Cell, MethodPairs, compare_methods
from llm_fed.runs.reading import saved_summary, scores_in_training
from llm_fed.runs.records import read_records
from llm_fed.scoring.scores import without
from llm_fed.settings.config import Config

MAX_PAIRS = 15  # of more pairs the terminal shows the headline alone
NAMES = {"average": "average over the clients", "worst_half": "worst half of the clients"}
OVER_CLIENTS = "average over the clients, with the clients as the sample"
_UNITS = {  # by what is drawn: over what the paired differences are, and what the intervals hold for
    "federations": ("draws of the federation", ""),
    "splits": (
        "draws of the split, the start and the batches",
        "The clients are the same in each draw, so these intervals hold for these clients. Whether a difference would "
        "be seen at others of the kind is asked with the clients as the sample, of their mean differences over the "
        "draws. Only what both lists claim is a claim about the kind.",
    ),
    "trainings": (
        "training seeds on one federation", "It holds for this federation alone, as all runs share it."
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Scored:
    """What the verdict needs of one finished run."""

    federation: int  # seed of the federation
    training: int  # seed of the training
    clients: Mapping[str, float]  # test scores, 0-100
    average: float | None  # over the clients
    worst_half: float | None  # mean of the ceil(n / 2) lowest clients
    last: Mapping[str, Any] | None = None  # split, average and worst_half of the last round, where they were scored
    # average and worst_half of the best rule that trains nothing on the same data, where it is known
    rule: Mapping[str, float] | None = None


class Verdict:
    """The verdict on all pairs of methods, of the finished runs of each.

    Args:
        natural: whether the clients come with the data (a task, a role, a desk each), and are not drawn with a seed.

    Attributes:
        drawn: what a seed draws: `federations`; `splits`, with the training, where the same natural clients are in all
            runs; or `trainings`, where all runs share one federation.
    """

    def __init__(self, runs: Mapping[str, Sequence[Scored]], *, natural: bool = False):
        self.runs = {method: list(finished) for method, finished in runs.items() if finished}
        everything = [run for finished in self.runs.values() for run in finished]
        self.federations = len({run.federation for run in everything})
        trainings = len({run.training for run in everything})
        self.one_federation = self.federations == 1 and trainings > 1
        same = natural and len({frozenset(run.clients) for run in everything}) == 1
        self.drawn: Literal["federations", "splits", "trainings"] = (
            "trainings" if self.one_federation else "splits" if same else "federations"
        )

    @cached_property
    def columns(self) -> dict[str, MethodPairs]:
        """`average` and `worst_half` of the tested round, then `last_average` and `last_worst_half` where known; a
        quantity that says the same as one before it is left out."""
        quantities: dict[str, Any] = {}
        for name, scores in self._quantities():
            if sum(map(bool, scores.values())) > 1 and scores not in quantities.values():
                quantities[name] = scores
        return {name: compare_methods(scores) for name, scores in quantities.items()}

    @cached_property
    def over_clients(self) -> MethodPairs | None:
        """With the clients as the sample, each one's mean difference over its draws: whether a difference would be seen
        at further clients of the kind. None where clients are drawn, or too few to say."""
        if self.drawn != "splits":
            return None
        scores = {
            method: {(id, (run.federation, run.training)): score for run in runs for id, score in run.clients.items()}
            for method, runs in self.runs.items()
        }
        column = compare_methods(scores, "client")
        return column if column.known else None

    @cached_property
    def rules(self) -> dict[str, AboveRule]:
        """By quantity how the methods stand to the best rule that trains nothing, which is in none of their pairs."""
        compared = {}
        for name in NAMES:
            compared[name] = above_rule(self._scores(name), self._scores(name, of="rule"))
        return {name: above for name, above in compared.items() if above}

    @property
    def of_rules(self) -> list[str]:
        said = [f"{self.title(name)}: {s}" for name, compared in self.rules.items() for s in compared.sentences]
        return list(dict.fromkeys(said))

    def _quantities(self) -> Iterator[tuple[str, dict[str, dict[Cell, float]]]]:
        for name in NAMES:
            yield name, self._scores(name)
        splits = {run.last["split"] for runs in self.runs.values() for run in runs if run.last}
        # Some runs may have been tested in their last round by chance: such a choice of runs would be biased.
        whole = {method for method, runs in self.runs.items() if all(run.last for run in runs)}
        for name in NAMES if len(splits) == 1 else ():
            scores = self._scores(name, of="last")
            yield f"last_{name}", {method: cells if method in whole else {} for method, cells in scores.items()}

    def _scores(self, name: str, of: Literal["", "rule", "last"] = "") -> dict[str, dict[Cell, float]]:
        """By method and cell a quantity of the runs, of their rules, or of their last rounds, as far as it is known."""

        def cell(run: Scored) -> Cell:
            return (run.training, 0) if self.one_federation else (run.federation, run.training)

        def value(run: Scored) -> float | None:
            return (getattr(run, of) or {}).get(name) if of else getattr(run, name)

        return {
            method: {cell(run): score for run in runs if (score := value(run)) is not None}
            for method, runs in self.runs.items()
        }

    @property
    def judged(self) -> list[tuple[str, MethodPairs]]:
        """(title, column) of the quantities of which some pair has an interval."""
        return [(self.title(name), column) for name, column in self.columns.items() if column.known]

    @property
    def said(self) -> list[tuple[str, MethodPairs]]:
        """(title, column) of all quantities, the test over clients last."""
        said = [(self.title(name), column) for name, column in self.columns.items()]
        return [*said, *([(self.over_clients_title, self.over_clients)] if self.over_clients else [])]

    @property
    def over_clients_title(self) -> str:
        """What the test over clients is called; of few draws it is named before what it claims."""
        return OVER_CLIENTS + (", which claims too much from so few draws" if self.federations < LEAST else "")

    def bold(self, name: str) -> list[str]:
        column = self.columns.get(name)
        return column.best if column else []

    @property
    def sentences(self) -> list[str]:
        """Per quantity who is best, then each pair; then how the methods stand to `rule`."""
        said = []
        for title, column in self.said:
            said += [f"{title}: {column.headline}", *map(str, column.pairs)]
        return [*said, *self.of_rules]

    def title(self, name: str) -> str:
        if not name.startswith("last_"):
            return NAMES[name]
        split = next(run.last["split"] for runs in self.runs.values() for run in runs if run.last)
        return f"{NAMES[name.removeprefix('last_')]}, last round, {split} examples"

    @property
    def method(self) -> list[str]:
        unit, whole = _UNITS[self.drawn]
        if self.over_clients and self.federations < LEAST:
            whole += " With so few draws they leave out what all clients of a draw have in common, and claim too much."
        return [
            f"Intervals are of the paired difference in points over {unit}. With {LEVEL:.0%} probability all of a list "
            "hold at once, so that the number of pairs is paid for; `>` is said where the interval excludes 0.",
            *([whole] if whole else []),
            "About n more draws: as many would show a difference as large as the observed one with 80 % probability, "
            "to within a factor of two at best. Say beforehand how many there shall be: who looks after each draw and "
            "stops at the first claim makes more false ones.",
        ]

    def as_markdown(self) -> str:
        """The section `Verdict`; empty where nothing is compared."""
        lines: list[str] = []
        for title, column in self.said:
            lines += ["", f"**{_upper(title)}**: {column.headline}.", ""]
            lines += [f"- {pair}" for pair in column.pairs]
        if self.of_rules:
            lines += ["", "**Against `rule`**, the best rule that trains nothing:", ""]
            lines += [f"- {sentence}" for sentence in self.of_rules]
        if not lines:
            return ""
        return "\n".join(["", "## Verdict", *lines, "", *map(_upper, self.method), ""])

    def for_terminal(self) -> list[str]:
        """The verdict on the average, and the headlines of the other quantities."""
        lines: list[str] = []
        for title, column in self.said:
            lines.append(f"{title}: {column.headline}")
            if (not lines[1:] or column is self.over_clients) and len(column.pairs) <= MAX_PAIRS:
                lines += [f"  {pair}" for pair in column.pairs]
        return lines + self.of_rules

    def as_json(self) -> dict[str, Any]:
        columns = {name: _column_json(self.title(name), column) for name, column in self.columns.items()}
        rules = {name: compared.as_json() for name, compared in self.rules.items()}
        return {
            "level": LEVEL,
            "unit": "training" if self.one_federation else "federation",
            "drawn": self.drawn,
            "columns": columns,
            "over_clients": _column_json(self.over_clients_title, self.over_clients) if self.over_clients else None,
            "rule": rules,
            "sentences": self.sentences,
        }


def last_round(folder: Path, config: Config, uncounted: Collection[str] = ()) -> dict[str, Any] | None:
    """The scores of a run's last round on the split that is scored during training, before what clients finish alone:
    {split, average, worst_half}, without the clients that count in no mean (`uncounted`); None where the last round is
    the one that was tested, or a run has no rounds."""
    if config.eval.select == "last":
        return None
    scored = scores_in_training(read_records(folder / "metrics.jsonl"), config.eval.during)
    summary = saved_summary(folder) or {}
    ended = summary.get("ended", {"round": summary.get("rounds", config.rounds)})
    line = scored.get(ended["round"], {})
    if "mean" not in line:
        return None
    line = without(line, uncounted)
    return {"split": line["split"], "average": line["mean"], "worst_half": line["worst_half"]}


def _column_json(title: str, column: MethodPairs) -> dict[str, Any]:
    return {
        "title": title,
        "headline": column.headline,
        "leaders": column.leaders,
        "bold": column.best,
        "pairs": [pair.as_json() for pair in column.pairs],
    }


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
