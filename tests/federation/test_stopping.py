"""When a stop rule ends a run, by hand and against a rule that is written in another way."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_fed.federation.progress import stop_reason as reason
from llm_fed.settings.config import StopConfig


def lines(*scores: float, loss: float | None = None) -> list[dict]:
    return [{"round": 2 * n, "mean": score, "loss": loss} for n, score in enumerate(scores, 1)]


def ends(scores: list[float], stop: StopConfig, since: int = 0) -> int:
    """After which of the scores a run ends; 0: after none."""
    found = lines(*scores)
    return next((n for n in range(1, len(found) + 1) if reason(found[:n], stop, since)), 0)


@pytest.mark.parametrize(
    "scores, patience, min_delta, expected",
    [
        ([10, 20, 30], 1, 0.0, 0),
        ([10, 10], 1, 0.0, 2),  # an equal score is no improvement
        ([10, 9, 11, 10, 10], 2, 0.0, 5),  # the third begins the count anew
        ([10, 11, 12, 13], 2, 1.0, 0),  # 12 is more than one point above 10
        ([10, 11, 11, 13], 2, 1.0, 3),
        ([0, 0, 0], 3, 0.0, 0),
        ([0, 0, 0, 0], 3, 0.0, 4),
    ],
)
def test_by_hand(scores, patience, min_delta, expected):
    assert ends(scores, StopConfig(patience, min_delta)) == expected


def test_the_reason_names_rule_and_round():
    said = reason(lines(10, 9, 8), StopConfig(2, 0.5))
    assert said == (
        "stop.patience=2: the validation score of round 2 was not improved upon by more than 0.5 in 2 scored rounds"
    )


def test_what_the_user_let_go_on_counts_anew():
    scores, stop = [10.0, 9.0, 9.0, 9.0, 9.0], StopConfig(2)
    assert ends(scores, stop) == 3 and ends(scores, stop, since=6) == 5


@settings(deadline=None)
@given(
    scores=st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12),
    patience=st.integers(1, 4), min_delta=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
)  # fmt: skip
def test_against_another_way_to_say_it(scores, patience, min_delta):
    """The run goes on exactly as long as one of the last `patience` values was an improvement when it came."""
    found = [{"round": n, "mean": x} for n, x in enumerate(scores, 1)]
    improved, best = [], -math.inf
    for value in scores:
        improved.append(value > best + min_delta)
        best = value if improved[-1] else best
    expected = len(scores) > patience and not any(improved[-patience:])
    assert bool(reason(found, StopConfig(patience, min_delta))) == expected
