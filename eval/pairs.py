"""Pairs of rows: the difference of their average over the clients, its interval, and whether it is a claim.

Runs of one draw see the same clients and rows, so differences are paired. Of a mean difference with its standard error
and its degrees of freedom (`variance`)

    t = mean / error,    interval = mean ± c error,

and c is chosen so that among all pairs of a comparison some interval misses its true difference in one of twenty
comparisons. c comes from drawing tables of as many rows with normal noise of one size, which cancels out
(`reference`): the distribution of the largest |t| of all pairs, each with a standard deviation of its own. For two rows
this is Student's t. A claim is made if and only if the interval excludes 0.

docs/verdict.md has the false claims of other ways, measured: Bonferroni's correction is wider without need, Tukey's
pooled deviation fails where rows vary unequally, bootstraps claim too much of few draws, and a sign-flip test cannot
claim anything below six draws.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import combinations
from statistics import NormalDist, fmean, median
from typing import Literal

import numpy as np

from llm_fed.basics.documents import Json
from llm_fed.eval.variance import LEAST, Design, MeanDifference, degrees

LEVEL = 0.95  # of all intervals of a comparison together
POWER = 0.8  # with which further draws shall resolve a difference
MARGIN = 0.5  # points; rows whose interval lies within are equal for practice
MOST = 1000  # more further draws than this are not counted
EVER = 1_000_000  # draws, after which no more would help
SIZE = 100_000  # tables behind an interval; its width is known to 1 % or better
SAME = 1e-9  # points; what differs by less is equal
NO_SHARES = "with fewer than four clients, or about these clients alone, each one's share of tested rows must be known"
LEAST_KINDS = 5  # draws, below which draws of two kinds cannot be told from noise

Cell = tuple[Hashable, Hashable]  # a draw, and what tells apart the runs on it (a training seed)
CellScores = Mapping[Cell, Mapping[str, float]]  # by cell the score of each client, 0-100
Scores = Mapping[str, CellScores]  # by row
Claim = Literal["greater", "equal", "unresolved", "unknown"]


@dataclass(frozen=True)
class MethodPair:
    """Two rows, the one with the higher mean first."""

    first: str
    second: str
    draws: int = 0  # that both have
    methods: int = 2  # rows of the comparison
    level: float = LEVEL  # of all intervals together
    difference: float | None = None  # mean over these draws and their clients, in points; None where none is common
    low: float | None = None  # ends of the interval; None where it cannot be known
    high: float | None = None
    draw: float = 0.0  # as in `MeanDifference`
    floor: float = 0.0
    df: float = 0.0
    clients: int = 0
    why: str = ""  # it is not judged

    @property
    def claim(self) -> Claim:
        """greater: `first` is better; equal: to within MARGIN; unknown: there is no interval."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low > 0:
            return "greater"
        return "equal" if self.high <= MARGIN and self.low >= -MARGIN else "unresolved"

    @property
    def more(self) -> int | None:
        """How many further draws would resolve the observed difference with a probability of POWER; None: over MOST."""
        low, high = self.draws, self.draws + MOST
        if self._power(high) < POWER:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._power(middle) >= POWER else (middle, high)
        return high - self.draws

    def _power(self, draws: int) -> float:
        """The probability of a claim after so many draws, where the true difference is the observed one."""
        if not (error := math.sqrt(self.floor + self.draw / draws)):
            return 0.0
        df = round(degrees(self.floor, self.draw, draws, self.clients), 1)
        limit = float(between(self.methods, df, self.level))
        shift, phi = (self.difference or 0.0) / error, NormalDist().cdf
        return fmean(phi(shift - own) + phi(-shift - own) for own in (limit * _deviations(df)).tolist())

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.first} ? {self.second}: {self.why or 'no common draw'}"
        if self.low is None or self.high is None:
            return self._unknown(self.difference)
        low, high = (f"{end:.2f}".replace("-0.00", "0.00") for end in (self.low, self.high))
        interval = f"{self.difference:.2f} [{low}, {high}]"
        if self.claim == "greater":
            return f"{self.first} > {self.second} by {interval}"
        if self.claim == "equal":
            return f"{self.first} = {self.second} to within {MARGIN}: {interval}"
        return f"{self.first} ~ {self.second}: unresolved, {interval}, {self._needed()}"

    def _unknown(self, difference: float) -> str:
        pair, observed = f"{self.first} ? {self.second}", f"(observed difference {difference:.2f})"
        if self.why:
            return f"{pair}: not judged {observed}: {self.why}"
        if self.draws < LEAST:
            return f"{pair}: cannot be known from {draws_of(self.draws)} {observed}"
        if difference <= SAME:
            return f"{self.first} = {self.second} in each of {self.draws} draws"
        return f"{pair}: cannot be known from {self.draws} draws that all differ by exactly {difference:.2f}"

    def _needed(self) -> str:
        if (more := self.more) is not None:
            step = 10 ** max(0, len(str(more)) - 2)  # what stands behind two digits is not known better
            return f"about {-(-more // step) * step:,} more draw" + ("" if more == 1 else "s")
        if self.floor and self._power(EVER) < POWER:
            clients = "more clients, or " if self.clients else ""
            return f"which no number of draws would resolve: it takes {clients}more tested rows"
        return f"more than {MOST:,} more draws"

    def as_json(self) -> dict[str, Json]:
        inside = ("methods", "level", "draw", "floor", "clients", "why")
        known = {key: value for key, value in asdict(self).items() if key not in inside}
        more = self.more if self.claim == "unresolved" else None
        return {**known, "claim": self.claim, "more_draws": more, "sentence": str(self)}


@dataclass(frozen=True)
class MethodPairs:
    """The average over the clients of all rows."""

    pairs: list[MethodPair]
    methods: list[str]  # with a score, the highest mean first
    collapsed: Mapping[str, str] = field(default_factory=dict)  # rows whose draws are of two kinds, and in what words

    @property
    def leaders(self) -> list[str]:
        """The rows that no other is shown to beat."""
        beaten = {pair.second for pair in self.pairs if pair.claim == "greater"}
        return [method for method in self.methods if method not in beaten and method not in self.collapsed]

    @property
    def best(self) -> list[str]:
        """What may be printed in bold: the leaders, where somebody is beaten; else nobody."""
        return self.leaders if any(pair.claim == "greater" for pair in self.pairs) else []

    @property
    def known(self) -> bool:
        return any(pair.low is not None for pair in self.pairs)

    @property
    def headline(self) -> str:
        collapsed = [f"{row} {words}, so no mean of it is judged" for row, words in self.collapsed.items()]
        return "; ".join([self._winner, *collapsed])

    @property
    def _winner(self) -> str:
        if not self.known:
            most = max((pair.draws for pair in self.pairs), default=0)
            if not self.pairs:
                return "nothing is compared: there is only one row"
            if most < LEAST:
                return f"cannot be known from {draws_of(most)}; at least {LEAST} are needed, and 10 are better"
            if any(pair.why for pair in self.pairs):
                return "no winner can be named: no pair is judged"
            return "no winner can be named: the differences do not vary from draw to draw"
        if not self.best:
            return "no winner can be named: no method is shown to be better than another"
        if len(self.best) == 1:
            others = "others that are judged" if self.collapsed else "others"
            return f"{self.best[0]} is best: each of the {others} is shown to be worse than it, or than another"
        return f"no winner can be named among {all_of(self.best)}"


def compare_methods(scores: Scores, design: Design, level: float = LEVEL) -> MethodPairs:
    """The verdict on the average over the clients, from the cells and clients that both of a pair have; the cells of
    one draw count as one."""
    means = {name: fmean(by_draw.values()) for name, own in scores.items() if (by_draw := _by_draw(own))}
    methods = sorted(means, key=lambda name: -means[name])
    kinds = of_two_kinds({name: _by_draw(scores[name]) for name in methods})
    couples = list(combinations(methods, 2))
    pairs = [MethodPair(a, b, methods=len(methods), level=level) for a, b in couples]
    return MethodPairs(_judged(pairs, [(scores[a], scores[b]) for a, b in couples], design, kinds), methods, kinds)


def compare_with(scores: Scores, controls: Scores, control: str, design: Design, level: float) -> dict[str, MethodPair]:
    """By row its comparison with its control (of this name), of those that have a common cell; the intervals hold
    together, as wide as in a comparison of all rows and one control."""
    names = [name for name, own in scores.items() if own.keys() & controls.get(name, {}).keys()]
    kinds = of_two_kinds({name: _by_draw(scores[name]) for name in names})
    pairs = [MethodPair(name, control, methods=len(names) + 1, level=level) for name in names]
    sides = [(scores[name], controls[name]) for name in names]
    return dict(zip(names, _judged(pairs, sides, design, kinds), strict=True))


def _judged(
    pairs: Sequence[MethodPair],
    sides: Sequence[tuple[CellScores, CellScores]],
    design: Design,
    collapsed: Mapping[str, str],
) -> list[MethodPair]:
    """Each pair with what its scores say. Those that have the same draws and clients are estimated together."""
    tables = [_differences(first, second, design) for first, second in sides]
    judged = list(pairs)
    for draws, clients in dict.fromkeys((draws, clients) for draws, clients, _ in tables):
        places = [place for place, table in enumerate(tables) if table[:2] == (draws, clients)]
        differences = np.stack([tables[place][2] for place in places])
        estimate = design.estimate(differences, clients) if len(draws) >= LEAST and differences.size else None
        for number, place in enumerate(places):
            judged[place] = _pair(judged[place], differences[number], estimate, number, collapsed)
    return judged


def _pair(
    pair: MethodPair,
    differences: np.ndarray,
    estimate: MeanDifference | None,
    number: int,
    collapsed: Mapping[str, str],
) -> MethodPair:
    """One pair with its differences (n, K), of which `estimate` has what is known in its place `number`."""
    draws = len(differences)
    if not differences.size:
        return replace(pair, why="no client that both have in each draw" if draws else "")
    value = float(differences.mean())
    first, second = (pair.first, pair.second) if value >= 0 else (pair.second, pair.first)
    pair = replace(pair, first=first, second=second, draws=draws, difference=abs(value))
    named = [f"{row} {collapsed[row]}" for row in (first, second) if row in collapsed]
    if draws < LEAST or named or estimate is None:
        return replace(pair, why=" and ".join(named) or ("" if draws < LEAST else NO_SHARES))
    of_draw, floor, df = (float(part[number]) for part in (estimate.draw, estimate.floor, estimate.df))
    if (error := math.sqrt(floor + of_draw / draws)) <= SAME:  # equal to the last bits: nothing to measure noise by
        return pair
    half = error * critical(pair.methods, df, pair.level)
    return replace(pair, low=abs(value) - half, high=abs(value) + half, draw=of_draw, floor=floor, df=df,
                   clients=estimate.clients)  # fmt: skip


def _differences(
    first: CellScores, second: CellScores, design: Design
) -> tuple[tuple[Hashable, ...], tuple[str, ...], np.ndarray]:
    """The draws and clients that both have, and (n, K) by how much the first is above the second; where draws have
    clients of their own, these are averaged and K is 1."""
    found: dict[Hashable, dict[str, list[float]]] = {}
    for cell in (cell for cell in first if cell in second):
        of_draw = found.setdefault(cell[0], {})
        for client in (client for client in first[cell] if client in second[cell]):
            of_draw.setdefault(client, []).append(first[cell][client] - second[cell][client])
    found = {draw: of_draw for draw, of_draw in found.items() if of_draw}
    means = [{client: fmean(values) for client, values in of_draw.items()} for of_draw in found.values()]
    if not design.by_client:
        return tuple(found), (), np.array([[fmean(of_draw.values())] for of_draw in means])
    clients = tuple(client for client in means[0] if all(client in of_draw for of_draw in means)) if means else ()
    return tuple(found), clients, np.array([[of_draw[client] for client in clients] for of_draw in means])


def _by_draw(own: CellScores) -> dict[Hashable, float]:
    """By draw the mean over its cells of the average over the clients."""
    found: dict[Hashable, list[float]] = {}
    for (draw, _), clients in own.items():
        if clients:
            found.setdefault(draw, []).append(fmean(clients.values()))
    return {draw: fmean(values) for draw, values in found.items()}


def of_two_kinds(means: Mapping[str, Mapping[Hashable, float]]) -> dict[str, str]:
    """The rows that collapsed in some of their draws, and in what words."""
    found = {}
    for name, own in means.items():
        others = [[other[draw] for row, other in means.items() if row != name and draw in other] for draw in own]
        relative = [score - (median(of) if of else 0.0) for score, of in zip(own.values(), others, strict=True)]
        scores = np.array([*own.values()])
        if (low := collapses(scores, np.array(relative))).any():
            lowest = ", ".join(f"{score:.1f}" for score in np.sort(scores[low])[:5])
            found[name] = f"collapsed in {low.sum()} of {len(own)} draws: {lowest}"
    return found


def collapses(scores: np.ndarray, relative: np.ndarray) -> np.ndarray:
    """In which of n draws a row collapsed (..., n), in half of them at most, by its scores (..., n) and by how much
    these are above the other rows' median of the same draw. In one of the two a gap parts these draws from the others
    that is so wide as normal noise has it in one row of a hundred, and in the other a gap at least half as wide."""
    found, n = np.zeros(scores.shape, bool), scores.shape[-1]
    for values, beside in ((scores, relative), (relative, scores)) if n >= LEAST_KINDS else ():
        order = np.argsort(values, axis=-1)
        values, beside = (np.take_along_axis(each, order, axis=-1) for each in (values, beside))
        for low in range(1, n // 2 + 1):
            gap = values[..., low] - values[..., low - 1]
            squares = low * values[..., :low].var(axis=-1) + (n - low) * values[..., low:].var(axis=-1)
            wide = gap > max(3, 50 / n) * np.maximum(np.sqrt(squares / (n - 2)), MARGIN)
            wide &= beside[..., low:].mean(axis=-1) - beside[..., :low].mean(axis=-1) > gap / 2
            found |= wide[..., None] & (order.argsort(axis=-1) < low)
    return found


def critical(methods: int, df: float, level: float = LEVEL) -> float:
    """c, the half width of an interval in standard errors."""
    return _whole(methods, int(df), level) if df == int(df) else float(between(methods, df, level))


@cache
def _whole(methods: int, df: int, level: float) -> float:
    return float(np.quantile(reference(methods, df), level))


@cache
def reference(methods: int, df: int, size: int = SIZE) -> np.ndarray:
    """(size,), ascending: the largest |t| over all pairs, of `size` tables of normal noise, equal for all methods. The
    means and the matrix of squares are drawn for themselves (Bartlett 1933), so that many draws cost no more."""
    rng = np.random.default_rng((methods, df + 1))
    rows = min(df, methods)
    root = np.triu(rng.standard_normal((size, rows, methods)), 1)  # squares = root' root
    root[:, range(rows), range(rows)] = np.sqrt(rng.chisquare(df - np.arange(rows), (size, rows)))
    means = rng.standard_normal((size, methods))  # times sqrt(draws)
    largest = np.zeros(size)
    for a in range(1, methods):
        squares = np.square(root[:, :, a, None] - root[:, :, :a]).sum(axis=1)
        ratios = np.abs(means[:, a, None] - means[:, :a]) / np.sqrt(squares / df)
        np.maximum(largest, ratios.max(axis=1), out=largest)
    return np.sort(largest)


_GRID = (2, 3, 4, 5, 7, 10, 15, 30, 100, 10_000)  # degrees of freedom; in between 1 / df is interpolated


@cache
def _known(methods: int, level: float) -> list[float]:
    return [math.log(np.quantile(reference(methods, df, SIZE // 5), level)) for df in _GRID]


def between(methods: int, df: float | np.ndarray, level: float = LEVEL) -> np.ndarray:
    """c to within 2 %, quickly for any degrees of freedom from 2 on."""
    return np.exp(np.interp(1 / np.asarray(df), [1 / known for known in _GRID[::-1]], _known(methods, level)[::-1]))


@cache
def _deviations(df: float) -> np.ndarray:
    """(1,000,): sample standard deviations of normal noise of standard deviation 1."""
    return np.sqrt(np.random.default_rng(0).chisquare(df, 1000) / df)


def draws_of(number: int) -> str:
    return f"{number:,} draw{'' if number == 1 else 's'}"


def all_of(names: Sequence[str]) -> str:
    """`fedit`, or `fedit, fedmerge and local`."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
