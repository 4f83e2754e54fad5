"""What a comparison knows of its runs: the verdict on each pair of rows, by the average over the clients, and who is
best if anybody. `llm_fed.verdict` gives the same of a table that somebody else made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, get_args

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, listed
from llm_fed.eval.pairs import LEVEL, Cell, MethodPair, Scores, all_of, compare_methods, compare_with
from llm_fed.eval.variance import LEAST, LEAST_CLIENTS, Design, Drawn

if TYPE_CHECKING:
    import pandas as pd

MAX_PAIRS = 15  # of more pairs the terminal shows the headline alone
TITLE = "average over the clients"
NOT_JUDGED = "The worst half, single clients and other rounds are shown, and not judged."
COLUMNS = ("row", "draw", "client", "score")
MOST_POINTS = 1e6  # of a score; beyond, squares overflow
SHARE = 0.01  # of what all intervals may miss, for `rule`: it is seldom near, and pairs need the rest
SKEWED = 8  # clients, up to which skewed effects of the clients make more false claims than it says
_DRAWN = {
    "federations": "draws of the federation, and hold for federations that are drawn in the same way",
    "splits": "draws of the split, the start and the batches",
    "fixed": "draws of the start and the batches, which all test on the same rows",
    "trainings": "training seeds on one federation, and hold for this federation alone, as all runs share it",
}
_SAMPLE = {
    "crossed": "Clients and draws are both samples, so the intervals hold for clients of the kind.",
    "splits": "They hold for these clients and no others; that draws split the same rows is counted.",
    "fixed": "They hold for these rows of these clients only, and say nothing about others.",
}


@dataclass(frozen=True)
class Scored:
    """What the verdict needs of one finished run."""

    federation: int  # seed of the federation
    training: int  # seed of the training
    clients: Mapping[str, float | None]  # test scores, 0-100; None or NaN where a score is not defined
    rule: Mapping[str, float] | None = None  # of the best rule that trains nothing on the same data, where it is known
    tested: str | None = None  # a checksum of the tested rows, where it is known
    shares: Mapping[str, float] = field(default_factory=dict)  # by client which part of its rows is tested


@dataclass(frozen=True)
class AboveRule:
    """How the methods stand to `rule`, the best rule that trains nothing (`rules.py`)."""

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
            signs = {name: 1 if pair.first == name else -1 for name, pair in self.pairs.items()}
            seen = [f"{name} by {sign * (self.pairs[name].difference or 0.0):+.1f}" for name, sign in signs.items()]
            draws = f"{most} draw" + ("s" if most > 1 else "")
            return f"against rule, which trains nothing: cannot be known from {draws} (observed: {', '.join(seen)})"
        rest = [name for name in self.pairs if name not in (*self.above, *self.below)]
        said = {"shown to be above": self.above, "shown to be below": self.below, "not shown to be above": rest}
        groups = [(names, "is" if len(names) == 1 else "are", what) for what, names in said.items() if names]
        return "; ".join(f"{all_of(names)} {verb} {what} rule" for names, verb, what in groups)

    def as_json(self) -> dict[str, Json]:
        pairs = {name: pair.as_json() for name, pair in self.pairs.items()}
        return {"above": self.above, "below": self.below, "pairs": pairs, "sentences": [self.sentence]}


class Verdict:
    """The verdict on all pairs of rows: its `column` has the pairs, and who is best. `scores`: by row, cell and client,
    in points; only those that are finite count. `rules`: by row the same of its best rule that trains nothing."""

    def __init__(self, scores: Scores, design: Design, rules: Scores | None = None):
        self.scores, self.design = {row: _defined(own) for row, own in scores.items()}, design
        against = compare_with(self.scores, rules or {}, "rule", design, 1 - SHARE)
        self.rule = AboveRule(against) if against else None
        self.column = compare_methods(self.scores, design, LEVEL + SHARE * bool(self.rule))

    @classmethod
    def of_runs(cls, runs: Mapping[str, Sequence[Scored]], *, natural: bool = False) -> Verdict:
        """Of the finished runs of each row; `natural`: no seed draws the clients, they come with the data."""
        runs = {row: finished for row, finished in runs.items() if finished}
        everything = [run for finished in runs.values() for run in finished]
        shares: dict[str, list[float]] = {}
        for run in everything:
            for client, share in run.shares.items():
                shares.setdefault(client, []).append(share)
        drawn = _drawn(everything, natural)

        def cell(run: Scored) -> Cell:
            return (run.training, 0) if drawn == "trainings" else (run.federation, run.training)

        scores = {row: {cell(run): run.clients for run in finished} for row, finished in runs.items()}
        rules = {row: {cell(run): run.rule for run in finished if run.rule} for row, finished in runs.items()}
        return cls(scores, Design(drawn, {client: fmean(of) for client, of in shares.items()}), rules)

    @classmethod
    def of_frame(
        cls, frame: pd.DataFrame, drawn: Drawn, test_share: float | Mapping[str, float] | None, these_clients: bool
    ) -> Verdict:
        """See `llm_fed.verdict`."""
        if drawn not in get_args(Drawn):
            raise UserError(f"drawn is {drawn!r}; it takes {listed(get_args(Drawn))}")
        scores = _of_frame(frame)
        clients = {client: None for own in scores.values() for cell in own.values() for client in cell}
        return cls(scores, Design(drawn, _shares(test_share, list(clients)), these_clients))

    @property
    def drawn(self) -> Drawn:
        return self.design.drawn

    @cached_property
    def claims(self) -> pd.DataFrame:
        """A line per pair: first, second, difference, low, high (in points; NaN where unknown), and shown."""
        import pandas as pd

        lines = [(pair.first, pair.second, pair.difference, pair.low, pair.high) for pair in self._pairs]
        claims = pd.DataFrame(lines, columns=["first", "second", "difference", "low", "high"])
        claims = claims.astype({"difference": float, "low": float, "high": float})
        return claims.assign(shown=[pair.claim == "greater" for pair in self._pairs])

    @property
    def _pairs(self) -> list[MethodPair]:
        return [*self.column.pairs, *(self.rule.pairs.values() if self.rule else ())]

    @property
    def sentences(self) -> list[str]:
        """Who is best, then each pair; then how the methods stand to `rule`."""
        if not self.scores:
            return []
        return [f"{TITLE}: {self.column.headline}", *map(str, self.column.pairs), *self.of_rules]

    @property
    def of_rules(self) -> list[str]:
        return [f"{TITLE}: {self.rule.sentence}"] if self.rule else []

    @property
    def method(self) -> list[str]:
        """How it is made, and what it holds for."""
        level = self.column.pairs[0].level if self.column.pairs else LEVEL
        rules = f" ({level:.0%} those of pairs, and 99 % those against rule)" if self.rule else ""
        draws = max((pair.draws for pair in self._pairs), default=0)
        return [
            f"Intervals are of the paired difference in points, of the average over the clients, over "
            f"{_DRAWN[self.drawn]}. With {LEVEL:.0%} probability all of them hold at once{rules}, so that the number "
            "of pairs is paid for; `>` is said where the interval excludes 0.",
            *self._samples(),
            *self._lacking(),
            NOT_JUDGED,
            "About n more draws: as many would show a difference as large as the observed one with 80 % probability, "
            "to within a factor of two at best. Say beforehand how many there shall be: who looks after each draw and "
            "stops at the first claim makes more false ones.",
            *([f"A row that collapses in a tenth of its draws does so in none of {draws} with a probability of "
               f"{0.9**draws:.0%}, and nothing here can tell."] if draws >= LEAST else []),
        ]  # fmt: skip

    def _samples(self) -> Iterator[str]:
        """What the pairs are judged as a sample of, and what is known of the intervals then."""
        pairs = [pair for pair in self._pairs if pair.low is not None]
        samples = dict.fromkeys("crossed" if pair.clients else self.drawn for pair in pairs)
        yield from (_SAMPLE[sample] for sample in samples if sample in _SAMPLE)
        if any(0 < pair.clients <= SKEWED for pair in pairs):
            yield (
                f"Of {LEAST_CLIENTS} to {SKEWED} clients, a few of which differ far more than the others, 9 to 12 % "
                "of comparisons make a false claim."
            )

    def _lacking(self) -> Iterator[str]:
        """Clients that are in none or not in all of their pairs, as a row has no score of theirs in some draw."""
        cells = [clients for own in self.scores.values() for clients in own.values()]
        everybody = dict.fromkeys(client for clients in cells for client in clients)
        lacking = [client for client in everybody if not all(client in clients for clients in cells)]
        if lacking and self.design.by_client:
            yield (
                "These clients have no score in some draw of some row, and count in no pair with it: "
                f"{listed(lacking)}."
            )

    def as_markdown(self) -> str:
        """The section `Verdict`; empty where nothing is compared."""
        if not self._pairs:
            return ""
        lines = ["", f"**{TITLE.capitalize()}**: {self.column.headline}.", ""]
        lines += [f"- {pair}" for pair in self.column.pairs]
        if self.rule:
            lines += ["", f"**Against `rule`**, the best rule that trains nothing: {self.rule.sentence}."]
        return "\n".join(["", "## Verdict", *lines, "", *self.method, ""])

    def __str__(self) -> str:
        return "\n".join([*self.sentences, "", *self.method])

    def for_terminal(self) -> list[str]:
        """The verdict; of many pairs the headline."""
        if not self._pairs:
            return []
        pairs = self.column.pairs if len(self.column.pairs) <= MAX_PAIRS else []
        return [f"{TITLE}: {self.column.headline}", *(f"  {pair}" for pair in pairs), *self.of_rules]

    def as_json(self) -> dict[str, Json]:
        column: dict[str, Json] = {
            "title": TITLE,
            "headline": self.column.headline,
            "leaders": self.column.leaders,
            "bold": self.column.best,
            "collapsed": self.column.collapsed,
            "pairs": [pair.as_json() for pair in self.column.pairs],
        }
        return {
            "level": LEVEL,
            "unit": "training" if self.drawn == "trainings" else "federation",
            "drawn": self.drawn,
            "columns": {"average": column} if self.column.pairs else {},
            "rule": {"average": self.rule.as_json()} if self.rule else {},
            "sentences": self.sentences,
        }


def _drawn(runs: Sequence[Scored], natural: bool) -> Drawn:
    """What the seeds of runs draw. Clients that come with the data may lack a score here and there."""
    if len({run.federation for run in runs}) == 1 and len({run.training for run in runs}) > 1:
        return "trainings"
    sets = [set(run.clients) for run in runs]
    if not natural or not sets or 2 * len(set.intersection(*sets)) <= len(set.union(*sets)):
        return "federations"
    tested = {run.tested for run in runs}
    return "fixed" if len(tested) == 1 and None not in tested else "splits"


def _defined(own: Mapping[Cell, Mapping[str, float | None]]) -> dict[Cell, dict[str, float]]:
    """The cells of a row with the scores that are defined."""
    return {
        cell: {client: score for client, score in clients.items() if score is not None and math.isfinite(score)}
        for cell, clients in own.items()
    }


def _of_frame(frame: pd.DataFrame) -> dict[str, dict[Cell, dict[str, float]]]:
    """The scores of a table with COLUMNS, of which a missing one counts nowhere. UserError where it is not one."""
    import pandas as pd

    if absent := [name for name in COLUMNS if name not in frame.columns]:
        raise UserError(f"the table has no column {absent[0]!r}; it takes {', '.join(COLUMNS)}")
    if frame.empty:
        raise UserError("the table has no line, so there is nothing to compare")
    names, scores = frame[list(COLUMNS[:3])], pd.to_numeric(frame["score"], errors="coerce")
    no_points = (scores.isna() & frame["score"].notna()) | (scores.abs() > MOST_POINTS)
    for wrong, words in (
        (names.isna().any(axis=1) | (names == "").any(axis=1), "lacks its row, draw or client; give all three"),
        (names.astype(str).duplicated(), "has the row, draw and client of another; give the mean of their scores"),
        (no_points, "has a score that is no points, 0 to 100; leave it empty where it is not defined"),
    ):
        if wrong.any():
            place = int(wrong.to_numpy().argmax())
            line = ", ".join(str(frame[name].iloc[place]) for name in COLUMNS)
            raise UserError(f"line {place + 1} below the head ({line}) {words}")
    found: dict[str, dict[Cell, dict[str, float]]] = {}
    for (row, draw, client), score in zip(names.astype(str).itertuples(index=False), scores, strict=True):
        found.setdefault(row, {}).setdefault((draw, 0), {})[client] = float(score)
    return found


def _shares(given: float | Mapping[str, float] | None, clients: Collection[str]) -> dict[str, float]:
    """By client which part of its rows is tested. UserError where one is not between 0 and 1, or a client has none."""
    if given is None:
        return {}
    named = given if isinstance(given, Mapping) else dict.fromkeys(clients, given)
    shares = {str(client): share for client, share in named.items()}
    if absent := [client for client in clients if client not in shares]:
        raise UserError(f"test_share has no share of client {absent[0]}; it takes a number, or one for each client")
    for client, share in shares.items():
        if not isinstance(share, Real) or not 0 < float(share) < 1:
            raise UserError(
                f"the test share of {client} is {share!r}; give the part of its rows that is tested, above 0 and below "
                "1, such as 0.2; rows that no draw changes are drawn='fixed'"
            )
    return shares
