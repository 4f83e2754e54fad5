"""Pairs of methods: the difference of their scores over draws of the federation, its interval, and whether it is a
claim.

The unit of replication is one draw of the federation: its clients share data and training. All methods see the same
federation in a draw, so differences are paired. Of a pair with n common draws

    t = mean(d) / (sd(d) / sqrt(n)),    interval = mean(d) ± c sd(d) / sqrt(n),

and c is chosen so that in a whole column of the table, with all its pairs, some interval misses its true difference in
one of twenty tables. c comes from drawing tables of as many methods and draws with normal noise of one size, which
cancels out (`reference`): the distribution of the largest |t| of all pairs, each with a standard deviation of its own.
For two methods this is Student's t. A claim is made if and only if the interval excludes 0.

docs/verdict.md has the false claims of other ways, measured: Bonferroni's correction is wider without need, Tukey's
pooled deviation fails where methods vary unequally, bootstraps claim too much of few draws, a sign-flip test cannot
claim anything below six draws, and a mixed model of balanced draws is Tukey's again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from statistics import NormalDist, fmean, stdev
from typing import Any, Literal

import numpy as np

LEVEL = 0.95  # of all intervals of a column together
POWER = 0.8  # with which further draws shall resolve a difference
LEAST = 3  # draws; of two a standard deviation is little more than a guess
MARGIN = 0.5  # points; methods whose interval lies within are equal for practice
MOST = 1000  # more further draws than this are not counted
SIZE = 100_000  # tables behind an interval; its width is known to 1 % or better

Cell = tuple[Hashable, Hashable]  # a draw of the federation, and what tells apart the runs on it (a training seed)
Scores = Mapping[str, Mapping[Cell, float]]  # by method and cell
Claim = Literal["greater", "equal", "unresolved", "unknown"]


@dataclass(frozen=True)
class MethodPair:
    """Two methods, the one with the higher mean first."""

    first: str
    second: str
    draws: int  # that both have
    difference: float | None  # mean over these draws, in points; None without a common draw
    low: float | None  # ends of the interval; None where it cannot be known
    high: float | None
    sd: float | None  # of the differences, over draws
    p: float | None  # adjusted for all pairs of the column; below 0.05 where the interval excludes 0
    methods: int  # in the column
    unit: str = "draw"  # what is counted in `draws`: draws, or clients

    @property
    def claim(self) -> Claim:
        """greater: `first` is better; equal: to within MARGIN; unknown: too few draws, or all differ alike."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low > 0:
            return "greater"
        return "equal" if self.high <= MARGIN and self.low >= -MARGIN else "unresolved"

    @property
    def more(self) -> int | None:
        """How many further draws would resolve the observed difference with a probability of POWER; None: over MOST."""
        if not self.sd or not self.difference:
            return None
        effect = abs(self.difference) / self.sd
        low, high = self.draws, self.draws + MOST
        if _power(effect, high, self.methods) < POWER:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if _power(effect, middle, self.methods) >= POWER else (middle, high)
        return high - self.draws

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.first} ? {self.second}: no common {self.unit}"
        if self.claim == "unknown":
            unknown = f"{self.first} ? {self.second}: cannot be known from {_count(self.draws, self.unit)}"
            if self.draws < LEAST:
                return f"{unknown} (observed difference {self.difference:.2f})"
            if not self.difference:
                return f"{self.first} = {self.second} in each of {self.draws} {self.unit}s"
            return f"{unknown} that all differ by exactly {self.difference:.2f}"
        interval = f"[{_signed(self.low)}, {_signed(self.high)}]"
        if self.claim == "greater":
            return f"{self.first} > {self.second} by {self.difference:.2f} {interval}"
        if self.claim == "equal":
            return f"{self.first} = {self.second} to within {MARGIN}: {self.difference:.2f} {interval}"
        more = self.more
        needed = f"more than {MOST:,} more" if more is None else f"about {_round_up(more):,} more"
        needed += f" {self.unit}" + ("" if more == 1 else "s")
        return f"{self.first} ~ {self.second}: unresolved, {self.difference:.2f} {interval}, {needed}"

    def as_json(self) -> dict[str, Any]:
        known = {key: value for key, value in asdict(self).items() if key != "methods"}
        more = self.more if self.claim == "unresolved" else None
        return {**known, "claim": self.claim, "more_draws": more, "sentence": str(self)}


@dataclass(frozen=True)
class MethodPairs:
    """One quantity (the average over the clients, say) of all methods."""

    pairs: list[MethodPair]
    methods: list[str]  # with a score, the highest mean first
    unit: str = "draw"  # of replication

    @property
    def leaders(self) -> list[str]:
        """The methods that no other is shown to beat."""
        beaten = {pair.second for pair in self.pairs if pair.claim == "greater"}
        return [method for method in self.methods if method not in beaten]

    @property
    def best(self) -> list[str]:
        """What may be printed in bold: the leaders, where somebody is beaten; else nobody."""
        return self.leaders if len(self.leaders) < len(self.methods) else []

    @property
    def known(self) -> bool:
        return any(pair.low is not None for pair in self.pairs)

    @property
    def headline(self) -> str:
        if not self.known:
            most = max((pair.draws for pair in self.pairs), default=0)
            if most >= LEAST:
                return f"no winner can be named: the differences do not vary from {self.unit} to {self.unit}"
            return f"cannot be known from {_count(most, self.unit)}; at least {LEAST} are needed, and 10 are better"
        if not self.best:
            return "no winner can be named: no method is shown to be better than another"
        if len(self.best) == 1:
            return f"{self.best[0]} is best: each of the others is shown to be worse than it, or than another"
        return f"no winner can be named among {' and '.join([', '.join(self.best[:-1]), self.best[-1]])}"


def compare_methods(scores: Scores, unit: str = "draw") -> MethodPairs:
    """The verdict on one quantity, 0-100, from the cells that both of a pair have; those of one draw count as one.
    `unit` is the word for what a cell's first part is."""
    methods = [name for name, values in scores.items() if values]
    methods.sort(key=lambda name: -fmean(scores[name].values()))
    pairs = [_pair(a, b, scores[a], scores[b], len(methods), unit) for a, b in combinations(methods, 2)]
    return MethodPairs(pairs, methods, unit)


def compare_with(scores: Scores, controls: Scores, control: str) -> dict[str, MethodPair]:
    """By method its comparison with its control (of this name), of those that have a common cell; the intervals hold
    together, as wide as in a column of all methods and one control."""
    methods = [name for name, values in scores.items() if values.keys() & controls.get(name, {}).keys()]
    return {name: _pair(name, control, scores[name], controls[name], len(methods) + 1) for name in methods}


def _pair(
    a: str, b: str, of_a: Mapping[Cell, float], of_b: Mapping[Cell, float], methods: int, unit: str = "draw"
) -> MethodPair:
    by_draw: dict[Hashable, list[float]] = {}
    for cell in of_a.keys() & of_b.keys():
        by_draw.setdefault(cell[0], []).append(of_a[cell] - of_b[cell])
    differences = [fmean(of_draw) for of_draw in by_draw.values()]
    n = len(differences)
    if not n:
        return MethodPair(a, b, 0, None, None, None, None, None, methods, unit)
    mean, sd = fmean(differences), stdev(differences) if n > 1 else None
    if mean < 0:
        a, b, mean = b, a, -mean
    if n < LEAST or not sd or sd <= 1e-9:  # equal to the last bits in every draw: nothing to measure their noise by
        return MethodPair(a, b, n, mean, None, None, sd, None, methods, unit)
    error = sd / math.sqrt(n)
    half = error * critical(methods, n)
    p = (1 + SIZE - int(np.searchsorted(reference(methods, n), abs(mean) / error))) / (1 + SIZE)
    return MethodPair(a, b, n, mean, mean - half, mean + half, sd, p, methods, unit)


@cache
def critical(methods: int, draws: int) -> float:
    """c, the half width of an interval in standard errors."""
    return float(np.quantile(reference(methods, draws), LEVEL))


@cache
def reference(methods: int, draws: int, size: int = SIZE) -> np.ndarray:
    """(size,), ascending: the largest |t| over all pairs, of `size` tables of normal noise, equal for all methods. The
    means and the matrix of squares are drawn for themselves (Bartlett 1933), so that many draws cost no more."""
    rng = np.random.default_rng((methods, draws))
    df = draws - 1
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


_GRID = (3, 4, 5, 6, 8, 11, 16, 31, 101, 10_001)  # draws; in between 1 / df is interpolated


@cache
def _approximate(methods: int, draws: int) -> float:
    """c to within 2 %, quickly for any number of draws."""
    known = [math.log(np.quantile(reference(methods, n, SIZE // 5), LEVEL)) for n in _GRID]
    places = [1 / (n - 1) for n in _GRID]
    return math.exp(np.interp(1 / (max(draws, LEAST) - 1), places[::-1], known[::-1]))


@cache
def _deviations(df: int) -> np.ndarray:
    """(1,000,): sample standard deviations of normal noise of standard deviation 1."""
    return np.sqrt(np.random.default_rng(df).chisquare(df, 1000) / df)


@cache
def _power(effect: float, draws: int, methods: int) -> float:
    """The probability of a claim where the true difference is `effect` standard deviations of one draw's difference."""
    shift, limits = effect * math.sqrt(draws), _approximate(methods, draws) * _deviations(draws - 1)
    phi = NormalDist().cdf
    return fmean(phi(shift - limit) + phi(-shift - limit) for limit in limits.tolist())


def _signed(value: float | None) -> str:
    assert value is not None
    return f"{value:.2f}".replace("-0.00", "0.00")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _round_up(number: int) -> int:
    """To two digits: what stands behind it is not known better."""
    step = 10 ** max(0, len(str(number)) - 2)
    return -(-number // step) * step
