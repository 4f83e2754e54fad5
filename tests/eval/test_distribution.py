"""Histograms of scores, in which the worst half stands out, and where a terminal shows one."""

from hypothesis import given
from hypothesis import strategies as st

from llm_fed.cli import printing
from llm_fed.eval.distribution import Bin, histogram


def test_bins_by_hand():
    """Of 5 scores the lowest 3 are the worst half; bins of 20 points are the narrowest of which 5 suffice."""
    assert histogram([100, 0, 19.9, 20, 45], most=5) == [
        Bin(0, 20, 2, 0), Bin(20, 40, 1, 0), Bin(40, 60, 0, 1), Bin(60, 80, 0, 0), Bin(80, 100, 0, 1)
    ]  # fmt: skip
    assert histogram([50.5, 50.7]) == [Bin(50, 51, 1, 1)] and histogram([]) == []
    assert [(bin.low, bin.count) for bin in histogram([50], within=[48.5])] == [(48, 0), (49, 0), (50, 1)]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.integers(1, 30))
def test_every_score_is_in_its_bin(scores, most):
    bins = histogram(scores, most=most)
    assert len(bins) <= most and sum(bin.worst for bin in bins) == (len(scores) + 1) // 2
    assert all(one.high == other.low for one, other in zip(bins, bins[1:], strict=False))
    for bin in bins:
        assert bin.count == sum(bin.low <= score < bin.high or score == bin.high == 100 for score in scores)


def of(count: int) -> dict:
    scores = {f"c{number:03d}": number / 2 for number in range(count)}
    score = {"metric": "rouge1", "clients": scores, "mean": 1.0, "std": 2.0, "worst_half": 0.5, "unscored": ["none"]}
    return {"base": {**score, "mean": 0.0}, "fedit": score}


def test_a_terminal_shows_a_distribution_of_many_clients(capfd):
    printing.print_scores(of(200))
    said = capfd.readouterr().out
    assert len(said.splitlines()) < 30
    for part in (
        "200 clients",
        "90 to 100",
        "lowest: c000 0.0, c001 0.5, c002 1.0",
        "be scored on: none",
        "worst half",
    ):
        assert part in said
    assert "c100" not in said
    printing.print_scores(of(20))
    said = capfd.readouterr().out
    assert "c019" in said and "lowest" not in said
