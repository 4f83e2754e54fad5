"""Intervals of a difference over a client's test examples, and of a trend over rounds.

A client has few test examples, and their scores are often 0 or 100. Of two models on the same n examples

    d = first - second,    sd^2 = (sum (d - mean d)^2 + max d^2) / (n - 1),    interval = mean d ± t sd / sqrt(n),

with Student's t. The added square stands for an example that was not drawn: without it, ten differences that are all
alike would have no deviation at all, and few differing examples far too small a one. docs/warnings.md has the rates of
false warnings that were measured with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

from llm_fed.basics.names import rounded


@dataclass(frozen=True)
class Estimate:
    """A mean difference (or a slope) with what its interval is made of."""

    value: float
    error: float  # standard error
    df: float  # degrees of freedom of Student's t; below 1 no interval is known

    def interval(self, level: float) -> tuple[float, float]:
        """Both ends at a level in (0, 1); infinite where it cannot be known."""
        if self.df < 1:
            return -math.inf, math.inf
        half = t_quantile((1 + level) / 2, self.df) * self.error
        return self.value - half, self.value + half

    def figures(self, level: float) -> dict[str, float]:
        low, high = self.interval(level)
        return rounded({"difference": self.value, "low": low, "high": high, "level": level})


def paired(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """The mean of first - second over the same examples."""
    return mean_of([a - b for a, b in zip(first, second, strict=True)])


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of one number per example."""
    n = len(values)
    if n < 2:
        return Estimate(fmean(values) if values else 0.0, math.inf, 0)
    mean = fmean(values)
    squares = sum((value - mean) ** 2 for value in values) + max(value**2 for value in values)
    return Estimate(mean, math.sqrt(squares / (n - 1) / n), n - 1)


def between(first: Estimate, second: Estimate) -> Estimate:
    """first - second, of different examples (Welch 1947)."""
    error = math.hypot(first.error, second.error)
    if min(first.df, second.df) < 1 or not error:
        return Estimate(first.value - second.value, error, min(first.df, second.df))
    shares = [(part.error / error) ** 4 / part.df for part in (first, second)]
    return Estimate(first.value - second.value, error, 1 / sum(shares))


def of_means(first: float, second: float, count: int) -> Estimate:
    """The difference of two mean scores (0-100) of which the examples are not known. A score within 0 and 100 that has
    the mean m has at most the variance m (100 - m), so this interval is wider than that of known examples."""
    if count < 2:
        return Estimate(first - second, math.inf, 0)
    variances = sum(mean * (100 - mean) for mean in (first, second)) + (first - second) ** 2 / count
    return Estimate(first - second, math.sqrt(variances / (count - 1)), count - 1)


def slope(places: Sequence[float], values: Sequence[float]) -> Estimate:
    """Of the line through values by least squares, per unit of the places."""
    n = len(values)
    if n < 3:
        return Estimate(0.0, math.inf, 0)
    middle, mean = fmean(places), fmean(values)
    spread = sum((place - middle) ** 2 for place in places)
    rise = sum((place - middle) * (value - mean) for place, value in zip(places, values, strict=True)) / spread
    left = sum((v - mean - rise * (p - middle)) ** 2 for p, v in zip(places, values, strict=True))
    return Estimate(rise, math.sqrt(left / (n - 2) / spread), n - 2)


def t_quantile(share: float, df: float) -> float:
    """Student's t below which lies this share (above one half), within 1 % from 4 degrees of freedom on and exact for
    one and two (Abramowitz and Stegun, 26.7.5)."""
    if df < 3:  # exact for 1 and 2; a Welch df in between is rounded down
        if df < 2:
            return math.tan(math.pi * (share - 0.5))
        centred = 2 * share - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, 1))
