"""Robust means: each rule against its definition in numpy, and what a few liars can do to it."""

import math
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_fed.merge import mean, robust
from llm_fed.settings.config import ServerStepConfig
from llm_fed.state import State

RULES = ["median", "trimmed-mean", "krum", "multi-krum", "geometric-median", "centered-clipping"]
N, P, F = 11, 7, 3  # uploads, parameters, liars: 11 >= 2 * 3 + 3
LIARS = 0.25  # of 11: up to 3


def how(rule: str, liars: float = LIARS) -> ServerStepConfig:
    return ServerStepConfig(rule, liars)  # type: ignore[arg-type]


def states(rows: np.ndarray, dtype: torch.dtype = torch.float64) -> list[State]:
    return [
        State.of({"a": torch.tensor(row[:3], dtype=dtype), "b": torch.tensor(row[3:], dtype=dtype)}) for row in rows
    ]


def found(rule: str, rows: np.ndarray, weights: np.ndarray | None = None, **options: float) -> np.ndarray:
    share = torch.ones(len(rows)) if weights is None else torch.tensor(weights)
    (state,) = robust.aggregate(states(rows), share[None], how(rule, **options))
    return state.row.numpy()


def draw(seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).normal(1, 1, (n, P))


def krum_scores(rows: np.ndarray, f: int) -> list[float]:
    scores = []
    for i, row in enumerate(rows):
        others = sorted(((row - other) ** 2).sum() for j, other in enumerate(rows) if j != i)
        scores.append(sum(others[: len(rows) - f - 2]))
    return scores


def weighted_median(values: np.ndarray, shares: np.ndarray) -> float:
    """The value at which the sum of |x - v| over shares is least; of two such values their mean."""
    costs = np.array([(shares * abs(values - value)).sum() for value in values])
    return float(np.mean(sorted({*values[np.isclose(costs, costs.min(), rtol=1e-12)]})))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [11, 12])
def test_each_rule_by_hand(seed, n):
    """With equal weights, as its paper has it; a quarter of 12 is 3 at either end."""
    rows = draw(seed, n)
    np.testing.assert_allclose(found("median", rows), np.median(rows, axis=0), rtol=1e-12)
    cut = np.sort(rows, axis=0)[3 : n - 3]
    if n == 12:
        np.testing.assert_allclose(found("trimmed-mean", rows), cut.mean(axis=0), rtol=1e-12)
    else:  # 2.75 of 11: a quarter of the third is left at either end
        whole = 0.25 * (np.sort(rows, axis=0)[2] + np.sort(rows, axis=0)[n - 3]) + cut.sum(axis=0)
        np.testing.assert_allclose(found("trimmed-mean", rows), whole / 5.5, rtol=1e-12)
    order = np.argsort(krum_scores(rows, 3))
    np.testing.assert_allclose(found("krum", rows), rows[order[0]], rtol=1e-12)
    np.testing.assert_allclose(found("multi-krum", rows), rows[order[: n - 3]].mean(axis=0), rtol=1e-12)
    middle = found("geometric-median", rows)  # where the unit vectors to all uploads cancel out
    apart = rows - middle
    assert np.linalg.norm((apart / np.linalg.norm(apart, axis=1, keepdims=True)).sum(axis=0)) < 1e-5


@pytest.mark.parametrize("seed", range(5))
def test_shares_count(seed):
    rows, shares = draw(seed), np.random.default_rng(seed + 100).dirichlet(np.ones(N))
    medians = [weighted_median(column, shares) for column in rows.T]
    np.testing.assert_allclose(found("median", rows, shares), medians, rtol=1e-12)
    trimmed = []
    for column in rows.T:  # each upload as many times as its share says, to 1/100,000
        many = np.sort(np.repeat(column, np.round(shares * 100_000).astype(int)))
        trimmed.append(many[len(many) // 4 : -(len(many) // 4)].mean())
    np.testing.assert_allclose(found("trimmed-mean", rows, shares), trimmed, atol=2e-3)
    order = np.argsort(krum_scores(rows, 3))
    np.testing.assert_allclose(found("krum", rows, shares), rows[order[0]], rtol=1e-12)
    kept = order[: N - 3]
    np.testing.assert_allclose(
        found("multi-krum", rows, shares), np.average(rows[kept], axis=0, weights=shares[kept]), rtol=1e-12
    )
    apart = rows - found("geometric-median", rows, shares)
    pulls = shares[:, None] * apart / np.linalg.norm(apart, axis=1, keepdims=True)
    assert np.linalg.norm(pulls.sum(axis=0)) < 1e-6


def test_centered_clipping_by_hand():
    """From zero, five steps; the radius is the median norm."""
    rows = draw(3)
    limit = np.median(np.linalg.norm(rows, axis=1))
    v = np.zeros(P)
    for _ in range(5):
        apart = rows - v
        v = v + (apart * np.minimum(1, limit / np.linalg.norm(apart, axis=1))[:, None]).mean(axis=0)
    np.testing.assert_allclose(found("centered-clipping", rows), v, rtol=1e-10)


def bound(rule: str, honest: np.ndarray, n: int) -> float:
    """How far from the nearest honest upload a rule may end, by the diameter D of the honest ones.

    Krum: the score of what is chosen is at most that of an honest upload, (n - f - 2) D^2, and an honest upload is
    among its n - f - 2 nearest; multi-krum: all n - f that it keeps are so. Geometric median: 2 (1 - a) / (1 - 2a) D
    with a share a of liars (Lopuhaa, Rousseeuw 1991). Centered clipping: no step is longer than the median norm.
    """
    diameter = max(np.linalg.norm(a - b) for a, b in combinations(honest, 2))
    if "krum" in rule:
        return math.sqrt(n - F - 2) * diameter + diameter
    if rule == "geometric-median":
        a = F / n
        return 2 * (1 - a) / (1 - 2 * a) * diameter * 1.01
    longest = np.linalg.norm(honest, axis=1).max()
    return robust.CLIPPINGS * longest + longest


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    seed=st.integers(0, 10_000),
    liars=st.integers(1, F),
    scale=st.floats(1e-3, 1e30),
    alike=st.booleans(),
)
def test_a_few_liars_move_the_result_no_further_than_the_honest_are_apart(rule, seed, liars, scale, alike):
    rng = np.random.default_rng(seed)
    rows = rng.normal(1, 1, (12, P))
    lies = scale * rng.normal(0, 1, (1 if alike else liars, P))
    honest, rows[:liars] = rows[liars:].copy(), lies
    result = found(rule, rng.permutation(rows))
    assert np.isfinite(result).all()
    if rule in ("median", "trimmed-mean"):
        slack = 1e-9
        assert (result >= honest.min(axis=0) - slack).all() and (result <= honest.max(axis=0) + slack).all()
    else:
        assert np.linalg.norm(honest - result, axis=1).min() <= bound(rule, honest, 12)


def test_nearly_half_of_liars_at_one_far_point():
    """20 of 41: from the mean the algorithm would come nearer by a 42nd of the way in each step."""
    rows = np.random.default_rng(0).normal(1, 1, (41, P))
    rows[:20] = 1e30
    middle = found("geometric-median", rows, liars=0.49)
    apart = rows - middle
    assert np.linalg.norm((apart / np.linalg.norm(apart, axis=1, keepdims=True)).sum(axis=0)) < 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_the_mean_itself_has_no_such_bound_and_float32_has_it_too(rule):
    rows = draw(0)
    rows[0] = 1e30
    share = torch.ones(1, N)
    assert mean(states(rows)).row.min() > 1e28
    (narrow,) = robust.aggregate(states(rows, torch.float32), share, how(rule))
    assert narrow.row.dtype == torch.float32
    np.testing.assert_allclose(narrow.row.numpy(), found(rule, rows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_uploads_does_not_matter(rule):
    rows, shares = draw(1), np.random.default_rng(5).dirichlet(np.ones(N))
    order = np.random.default_rng(2).permutation(N)
    np.testing.assert_allclose(found(rule, rows[order], shares[order]), found(rule, rows, shares), rtol=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_several_shares_at_once_and_wide_rows_in_parts(rule, monkeypatch):
    rows = draw(4)
    weights = torch.tensor(np.random.default_rng(1).dirichlet(np.ones(N), 3))
    weights = torch.cat([weights, torch.zeros(1, N)])
    whole = robust.aggregate(states(rows), weights, how(rule))
    monkeypatch.setattr(robust, "COLUMNS", 2)
    for state, other, share in zip(whole, robust.aggregate(states(rows), weights, how(rule)), weights, strict=True):
        torch.testing.assert_close(other.row, state.row)
        if share.any():
            np.testing.assert_allclose(state.row.numpy(), found(rule, rows, share.numpy()), rtol=1e-12)
    if rule != "krum":
        assert not whole[3].row.any()


@pytest.mark.parametrize("rule", RULES)
def test_running_statistics_are_taken_by_coordinate(rule):
    """Under the trimmed mean they are trimmed, under every other rule they are the median; a counter stays as it is."""
    rows = draw(6)
    rows[:2] = 1e6
    with_extras = [
        State(state.layout, state.row, {"mean": torch.tensor(row).view(1, P), "count": torch.tensor(i)})
        for i, (state, row) in enumerate(zip(states(rows), rows, strict=True))
    ]
    (state,) = robust.aggregate(with_extras, torch.ones(1, N), how(rule))
    middle = state.row.numpy() if rule == "trimmed-mean" else np.median(rows, axis=0)
    np.testing.assert_allclose(state.extras["mean"].numpy()[0], middle, rtol=1e-12)
    assert state.extras["count"] == 0 and float(state.row.abs().max()) < 10


def test_nobody_counts_for_more_than_the_share_of_liars():
    """Of 1, 1, 1, 1 and 96 examples the last counts 0.25, and the others share the rest. Of 10, 60, 26, 2, 2 the second
    gives up 0.35, of which the third gets so much that it is over the bound, too."""
    assert robust.shares([1, 1, 1, 1, 96], 0.25).tolist() == pytest.approx([0.1875] * 4 + [0.25])
    wanted = [0.4 * 10 / 14, 0.3, 0.3, 0.4 * 2 / 14, 0.4 * 2 / 14]
    assert robust.shares([10, 60, 26, 2, 2], 0.3).tolist() == pytest.approx(wanted)
    assert robust.shares([1, 2, 3], 0.49).tolist() == pytest.approx([1 / 5.88, 2 / 5.88, 0.49], abs=1e-3)
    assert robust.shares([5, 1, 1, 1], 0.25).tolist() == pytest.approx([0.25] * 4)
    assert robust.shares([5, 1, 1, 9], 0.45).sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("rule", "liars", "least"),
    [
        ("mean", 0.2, 1), ("median", 0.2, 5), ("trimmed-mean", 0.25, 4), ("geometric-median", 0.45, 3),
        ("centered-clipping", 0.1, 10), ("krum", 0.2, 7), ("multi-krum", 0.25, 7),
    ],
)  # fmt: skip
def test_how_many_uploads_a_rule_needs(rule, liars, least):
    """So many that one upload is at most the share of liars, and of Krum n >= 2 ceil(liars n) + 3 as well."""
    assert not any(robust.lacking(n, how(rule, liars)) for n in range(least, 40))
    if least > 1:
        assert robust.lacking(least - 1, how(rule, liars)) == (
            f"server.aggregation={rule} with server.liars={liars:g} needs at least {least} uploads for a mean, and "
            f"there are {least - 1}"
        )
