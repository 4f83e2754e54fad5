"""Metrics of labels and numbers, compared with scikit-learn and scipy, and by hand."""

import math
import warnings

import numpy as np
import pytest

from llm_fed.scoring.metrics import f1, f1_macro, matthews, pearson, spearman
from llm_fed.scoring.rules import best_rule
from llm_fed.scoring.scores import score


def test_by_hand():
    """Right: 1 1 0 0 1; said: 1 0 0 1 1. TP 2, FP 1, FN 1, TN 1: F1 = 4 / 6, of label 0 it is 2 / 4.
    Matthews: (2 * 1 - 1 * 1) / sqrt(3 * 3 * 2 * 2) = 1 / 6."""
    said, right = [1, 0, 0, 1, 1], [1, 1, 0, 0, 1]
    assert score("f1", said, right) == pytest.approx(100 * 2 / 3)
    assert score("f1_macro", said, right) == pytest.approx(100 * (2 / 3 + 1 / 2) / 2)
    assert score("matthews", said, right) == pytest.approx(100 / 6)
    assert score("pearson", [1.0, 2.0, 3.0], [2.0, 4.0, 5.0]) == pytest.approx(100 * 3 / np.sqrt(2 * 14 / 3))
    assert score("spearman", [1.0, 2.0, 30.0], [2.0, 4.0, 5.0]) == pytest.approx(100)


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_labels_as_scikit_learn_has_them(classes):
    metrics = pytest.importorskip("sklearn.metrics")
    draws = np.random.default_rng(classes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in (1, 2, 9, 60) * 20:
            said, right = (draws.integers(0, classes, size).tolist() for _ in range(2))
            if len({*right}) == 1:
                assert all(math.isnan(metric(said, right)) for metric in (f1, f1_macro, matthews))
                continue
            macro = metrics.f1_score(right, said, average="macro", zero_division=0)
            assert f1_macro(said, right) == pytest.approx(100 * macro)
            if classes == 2:
                assert f1(said, right) == pytest.approx(100 * metrics.f1_score(right, said, zero_division=0))
            expected = metrics.matthews_corrcoef(right, said)
            assert matthews(said, right) == pytest.approx(100 * expected)


def test_numbers_as_scipy_has_them():
    stats = pytest.importorskip("scipy.stats")
    draws = np.random.default_rng(0)
    for size in (2, 3, 20, 100) * 20:
        said, right = draws.integers(0, 5, size) / 2, draws.normal(size=size)
        if np.ptp(said):
            assert pearson(said, right) == pytest.approx(100 * stats.pearsonr(said, right)[0])
            assert spearman(said, right) == pytest.approx(100 * stats.spearmanr(said, right)[0])


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_correlation_of_equal_numbers_is_not_defined(metric):
    for said, right in (([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]), ([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]), ([2.0], [0.0])):
        assert math.isnan(score(metric, said, right))
    assert math.isnan(score("pearson", [math.inf, 1.0, 2.0], [1.0, 2.0, 4.0]))  # of a head that diverged


class Labelled:
    def __init__(self, label: float):
        self.label = label


@pytest.mark.parametrize(
    "metric, rule",
    [("accuracy", "most frequent class"), ("f1", "one class for all"), ("pearson", "mean of the numbers")],
)
def test_the_rule_says_the_same_of_all(metric, rule):
    """Of 0 0 0 1 1 the label 0 is the most frequent, and 1 alone has an F1: 2 * 2 / (2 * 2 + 3)."""
    found = best_rule([Labelled(n) for n in (0, 0, 0, 1, 1)], [Labelled(n) for n in (0, 1, 1, 1)], metric)
    assert found is not None and found.name == rule
    expected = {"accuracy": 25, "f1": 100 * 6 / 7, "pearson": math.nan}[metric]
    assert found.score == pytest.approx(expected, nan_ok=True)
