"""Intervals of differences over examples and of slopes, against sums by hand and scipy."""

import math

import numpy as np
import pytest
from scipy import stats

from llm_fed.eval.intervals import Estimate, between, mean_of, of_means, paired, slope, t_quantile


def test_a_paired_difference_by_hand():
    """d = 20, 40, 0, 20: mean 20, squares 800, and the largest, 1600, once more: (800 + 1600) / 3 = 800, so the
    standard error is sqrt(800 / 4)."""
    found = paired([30, 50, 10, 20], [10, 10, 10, 0])
    assert (found.value, found.df) == (20.0, 3)
    assert found.error == pytest.approx(math.sqrt(200))


def test_differences_that_are_all_alike_have_an_interval():
    found = mean_of([100.0] * 10)
    assert found.error == pytest.approx(math.sqrt(10000 / 9 / 10))
    low, high = found.interval(0.95)
    assert 0 < low < 100 < high


def test_one_example_says_nothing():
    assert mean_of([50.0]).interval(0.5) == (-math.inf, math.inf)
    assert mean_of([]).interval(0.5) == (-math.inf, math.inf)


def test_two_samples_as_welch():
    """Without the added squares, which are those of values that are far from zero here."""
    one, other = Estimate(3.0, 0.5, 9), Estimate(1.0, 1.2, 4)
    found = between(one, other)
    shares = 0.5**2, 1.2**2
    assert found.df == pytest.approx(sum(shares) ** 2 / (shares[0] ** 2 / 9 + shares[1] ** 2 / 4))
    assert (found.value, found.error) == (2.0, pytest.approx(1.3))


def test_an_interval_of_means_alone_is_the_wider_one():
    rng = np.random.default_rng(0)
    for _ in range(50):
        first, second = 100 * rng.random(20), 100 * rng.random(20)
        known = paired(first.tolist(), second.tolist())
        assert of_means(first.mean(), second.mean(), 20).error >= 0.9 * known.error


def test_a_slope_is_that_of_scipy():
    places, values = np.arange(12.0), np.random.default_rng(1).standard_normal(12)
    expected = stats.linregress(places, values)
    found = slope(places.tolist(), values.tolist())
    assert (found.value, found.error, found.df) == (pytest.approx(expected.slope), pytest.approx(expected.stderr), 10)


@pytest.mark.parametrize("df", (1, 2, 4, 5, 9, 20, 200))
def test_quantiles_of_t(df):
    for share in (0.95, 0.99, 0.999):
        assert t_quantile(share, df) == pytest.approx(stats.t.ppf(share, df), rel=0.01)


def test_differing_answers_are_claimed_where_an_exact_test_does():
    """k of 20 answers are right under one model alone: McNemar's exact test has p = 2^(1 - k), and the interval leaves
    zero out at about the same k."""
    for k in range(3, 15):
        low, _ = paired([100.0] * k + [0.0] * (20 - k), [0.0] * 20).interval(0.95)
        assert (low > 0) == (2.0 ** (1 - k) < 0.07)
