"""The verdict: intervals by hand for each kind of draws, who is best, what is not judged, and how often it is wrong."""

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import llm_fed as package
from llm_fed.basics.errors import UserError
from llm_fed.eval import plots
from llm_fed.eval.pairs import MethodPair, compare_methods, critical, reference
from llm_fed.eval.variance import Design
from llm_fed.eval.verdict import Scored, Verdict

OVER_DRAWS = Design("federations")


def scores(**methods: Sequence[float]) -> dict[str, dict[tuple[int, int], dict[str, float]]]:
    """By method the score of draw 0, 1, ... of one client."""
    return {name: {(draw, 0): {"x": value} for draw, value in enumerate(values)} for name, values in methods.items()}


def table(values: np.ndarray, names: Sequence[str] = ()) -> pd.DataFrame:
    """Of (rows, draws, clients)."""
    names = names or [f"m{number}" for number in range(len(values))]
    lines = [(names[a], draw, f"c{k}", values[a, draw, k]) for a, draw, k in product(*map(range, values.shape))]
    return pd.DataFrame(lines, columns=["row", "draw", "client", "score"])


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return 50 + np.random.default_rng(seed).normal(0, 1, shape)


def test_an_interval_by_hand():
    """d = 1, 2, 3: mean 2, sd 1, and Student's t of 2 degrees of freedom at 97.5 % is 4.303: 2 ± 4.303 / sqrt(3) =
    2 ± 2.484. With d = 1, 2, 3, 2: sd sqrt(2 / 3), t of 3 is 3.182: 2 ± 3.182 sqrt(2 / 3) / 2 = 2 ± 1.299.
    The tables behind the interval give its width to 1 %."""
    (pair,) = compare_methods(scores(a=[0, 0, 0], b=[1, 2, 3]), OVER_DRAWS).pairs
    assert (pair.first, pair.second, pair.difference, pair.draws) == ("b", "a", 2, 3)
    assert (pair.low, pair.high) == pytest.approx((-0.484, 4.484), abs=0.03) and pair.claim == "unresolved"
    assert str(pair).startswith("b ~ a: unresolved, 2.00 [-0.4") and str(pair).endswith("about 2 more draws")
    (pair,) = compare_methods(scores(a=[0, 0, 0, 0], b=[1, 2, 3, 2]), OVER_DRAWS).pairs
    assert (pair.low, pair.high) == pytest.approx((0.701, 3.299), abs=0.03) and pair.claim == "greater"


@pytest.mark.parametrize("drawn", ["splits", "fixed"])
def test_crossed_clients_and_draws_by_hand(drawn):
    """d = 4 + client + draw + rest with clients -3, -1, 1, 3, draws -2, 2, 0, 0 and rests ±1. Then MS_client =
    4 * 20 / 3 = 26.67, MS_draw = 4 * 8 / 3 = 10.67 and MS_error = 16 / 9 = 1.78, so that the variance of the mean is
    (26.67 + 10.67 - 1.78) / 16 = 2.222, with 35.56^2 / (26.67^2 / 3 + 10.67^2 / 3 + 1.78^2 / 9) = 4.6 degrees of
    freedom, of which Student's t is 2.64 at 97.5 %."""
    rest = np.array([[1, -1, 1, -1], [-1, 1, -1, 1], [1, -1, -1, 1], [-1, 1, 1, -1]])
    d = 4 + np.array([-3, -1, 1, 3]) + np.array([[-2], [2], [0], [0]]) + rest
    claims = package.verdict(table(np.stack([np.full((4, 4), 50.0), 50.0 + d])), drawn=drawn).claims
    assert claims.columns.tolist() == ["first", "second", "difference", "low", "high", "shown"]
    (line,) = claims.itertuples(index=False)
    assert (line.first, line.second, line.difference, line.shown) == ("m1", "m0", 4, True)
    assert (line.high - line.low) / 2 == pytest.approx(2.222**0.5 * 2.64, rel=0.02)


@pytest.mark.parametrize("clients, options", [(3, {}), (5, {"these_clients": True})])
def test_re_split_rows_by_hand(clients, options):
    """Nadeau and Bengio: sd² (1 / n + q / (N - q)), with a fifth tested sd² (1 / n + 1 / 4)."""
    values = noise((2, 6, clients))
    d = (values[0] - values[1]).mean(axis=1)
    half = 2.571 * d.std(ddof=1) * math.sqrt(1 / 6 + 1 / 4)  # t of 5 degrees of freedom
    for share in (0.2, {f"c{k}": 0.2 for k in range(clients)}):
        verdict = package.verdict(table(values), drawn="splits", test_share=share, **options)
        assert verdict.claims.low[0] == pytest.approx(abs(d.mean()) - half, abs=0.02 * half)
        assert "these clients and no others" in str(verdict)
    unequal = {f"c{k}": 0.5 if k else 0.2 for k in range(clients)}  # of half tested more is in common
    wider = package.verdict(table(values), drawn="splits", test_share=unequal, **options).claims
    assert wider.high[0] - wider.low[0] > 2 * half
    assert "share of tested rows must be known" in str(package.verdict(table(values), drawn="splits", **options))


def test_rows_that_no_draw_changes():
    """With fewer than four clients the interval is of the draws, and holds for these rows alone."""
    fixed, draws = (package.verdict(table(noise((2, 6, 3))), drawn=drawn) for drawn in ("fixed", "trainings"))
    assert fixed.claims.equals(draws.claims) and "these rows of these clients only" in str(fixed)
    assert "this federation alone" in str(draws)


@pytest.mark.parametrize("draws, quantile", [(3, 4.3027), (5, 2.7764), (10, 2.2622), (200, 1.9720)])
def test_two_methods_are_students_t(draws, quantile):
    """Its tables at 97.5 %."""
    assert critical(2, draws - 1) == pytest.approx(quantile, rel=0.01)


def test_many_draws_are_tukeys_range():
    """Without doubt about the deviations the largest |t| of M means is the studentised range over sqrt(2): tables have
    3.633 and 4.286 for 4 and 8 means at 95 %."""
    for methods, value in ((4, 3.633), (8, 4.286)):
        assert np.quantile(reference(methods, 100_000), 0.95) == pytest.approx(value / 2**0.5, rel=0.01)


@pytest.mark.parametrize("effect, draws", [(1.0, 10), (0.5, 34), (0.2, 199)])
def test_draws_that_a_difference_needs(effect, draws):
    """Paired t tests at 5 % and 80 % power: the sizes that every table of sample sizes has."""
    pair = MethodPair("a", "b", draws=5, difference=effect, low=-1, high=3, draw=1.0)
    assert pair.more == pytest.approx(draws - 5, abs=1 + 0.02 * draws)
    little = MethodPair("a", "b", draws=5, difference=0.01, low=-1, high=3, draw=1.0)
    assert little.more is None and "more than 1,000 more draws" in str(little)


def test_no_number_of_draws_gets_below_the_floor():
    """Two clients of five are better by 20: further draws of the same clients cannot show more of the kind."""
    values = noise((2, 10, 5))
    values[1, :, :2] += 20
    assert "no number of draws would resolve: it takes more clients, or more tested rows" in str(
        package.verdict(table(values), drawn="splits")
    )
    few = noise((2, 10, 3), seed=2)
    few[1] += 0.3
    said = str(package.verdict(table(few), drawn="splits", test_share=0.5))
    assert "no number of draws would resolve: it takes more tested rows" in said


def test_what_cannot_be_known():
    """Two draws; differences that are all alike, of which a deviation would be 0; no common draw or client."""
    (two,) = compare_methods(scores(a=[1, 9], b=[2, 10.1]), OVER_DRAWS).pairs
    assert two.claim == "unknown" and two.low is None and "cannot be known from 2 draws" in str(two)
    (alike,) = compare_methods(scores(a=[1, 2, 3], b=[2, 3, 4]), OVER_DRAWS).pairs
    assert alike.claim == "unknown" and "all differ by exactly 1.00" in str(alike)
    column = compare_methods(scores(a=[1.5, 2, 3], b=[1.5, 2, 3]), OVER_DRAWS)
    assert str(column.pairs[0]) == "a = b in each of 3 draws" and column.best == [] and not column.known
    apart = {"a": {(0, 0): {"x": 1.0}}, "b": {(1, 0): {"x": 2.0}}}
    assert str(compare_methods(apart, OVER_DRAWS).pairs[0]) == "b ? a: no common draw"
    others = {"a": {(0, 0): {"x": 1.0}}, "b": {(0, 0): {"y": 2.0}}}
    assert str(compare_methods(others, Design("splits")).pairs[0]) == "b ? a: no common draw"
    one = package.verdict(table(noise((2, 1, 6))), drawn="splits")
    assert "cannot be known from 1 draw; at least 3" in one.sentences[0] and not one.claims.shown.any()
    assert Verdict({}, OVER_DRAWS).sentences == [] and Verdict({}, OVER_DRAWS).as_markdown() == ""


def test_equal_in_practice():
    (pair,) = compare_methods(scores(a=[50, 60, 70, 55], b=[50.1, 60, 70.1, 55]), OVER_DRAWS).pairs
    assert pair.claim == "equal" and str(pair).startswith("b = a to within 0.5: 0.05 [-0.0")


def test_who_is_best():
    """a and b differ by noise alone, and both beat c by ten points."""
    noise = np.array([0.3, -0.5, 0.2, -0.1, 0.4, -0.3])
    column = compare_methods(scores(c=50 - noise, a=60 + noise, b=60.1 - noise[::-1]), OVER_DRAWS)
    assert column.leaders == column.best == ["b", "a"] and "among b and a" in column.headline
    column = compare_methods(scores(a=60 + noise, c=50 - noise), OVER_DRAWS)
    assert column.best == ["a"] and column.headline.startswith("a is best")
    column = compare_methods(scores(a=60 + noise, b=60.1 - noise), OVER_DRAWS)
    assert (column.leaders, column.best) == (["b", "a"], []) and "no winner can be named" in column.headline


COLLAPSED = (
    (10, [(0, 2, -40), (0, 7, -38)], {"m0": "collapsed in 2 of 10 draws"}),
    (10, [(0, 2, +40)], {}),  # a lucky draw is no collapse of the other row
    (10, [(0, 2, -40), (1, 2, -40)], {}),  # a hard draw is none either
    (4, [(0, 2, -40)], {}),  # too few draws to tell
)


@pytest.mark.parametrize("draws, changes, named", COLLAPSED)
def test_a_row_of_two_kinds_is_named_and_not_judged(draws, changes, named):
    values = noise((2, draws, 6))
    values[1] += 5
    for row, draw, points in changes:
        values[row, draw] += points
    verdict = package.verdict(table(values), drawn="federations")
    assert {row: words.partition(":")[0] for row, words in verdict.column.collapsed.items()} == named
    if named:
        assert not verdict.claims.shown.any() and math.isnan(verdict.claims.low[0])
        assert "m1 ? m0: not judged (observed difference 1" in str(verdict) and verdict.column.best == []
        assert "in none of 10 with a probability of 35%" in str(verdict)


def test_a_missing_draw_is_left_out_of_its_pairs_alone():
    """b lacks draw 1, in which the others score far higher."""
    values = scores(a=[50, 90, 52, 51], c=[40, 80.5, 41.5, 40.5])
    values["b"] = {(0, 0): {"x": 45.0}, (2, 0): {"x": 47.5}, (3, 0): {"x": 45.5}}
    by_name = {(pair.first, pair.second): pair for pair in compare_methods(values, OVER_DRAWS).pairs}
    assert by_name["a", "c"].draws == 4 and by_name["a", "b"].draws == 3
    assert by_name["a", "b"].difference == pytest.approx((5 + 4.5 + 5.5) / 3)


def test_a_score_that_is_not_defined_counts_nowhere():
    """One draw lacks client c4 of one row: the pair is judged by the other four, and the text names it."""
    frame = table(noise((2, 6, 5)))
    frame.loc[7 * 5 - 1 + 5 * 0, "score"] = None  # draw 6 of 12 in all, the last client
    whole = package.verdict(frame[frame.client != "c4"], drawn="splits")
    verdict = package.verdict(frame, drawn="splits")
    assert verdict.claims.equals(whole.claims) and "count in no pair with it: c4." in str(verdict)


def test_training_seeds_of_a_federation_are_one_draw():
    """Three federations with four training seeds each are three draws, not twelve."""
    rng = np.random.default_rng(0)
    found: dict[str, list[Scored]] = {"a": [], "b": []}
    for federation in range(3):
        shift = rng.normal(0, 3)
        for training, (name, runs) in product(range(4), found.items()):
            value = 50 + shift * (name == "a") + rng.normal(0, 0.1)
            runs.append(Scored(federation, training, {"x": value, "y": value + 1}))
    (pair,) = Verdict.of_runs(found).column.pairs
    assert pair.draws == 3 and pair.claim == "unresolved"


def runs_of(differences: Mapping[str, Sequence[float]], **changes) -> dict[str, list[Scored]]:
    """Two methods on the same clients; by client by how much `b` is above `a` in each draw."""
    draws = range(len(next(iter(differences.values()))))
    return {
        name: [
            Scored(**{"federation": draw, "training": draw, **changes,
                      "clients": {id: 50.0 + (of[draw] if name == "b" else 0) for id, of in differences.items()}})
            for draw in draws
        ]
        for name in "ab"
    }  # fmt: skip


def test_what_seeds_draw():
    """Clients that come with the data may lack a score here and there; test rows may be the same in all draws."""
    runs = runs_of({id: [1.0, 2.0, 3.0] for id in "wxyz"})
    assert Verdict.of_runs(runs).drawn == "federations"
    assert Verdict.of_runs(runs, natural=True).drawn == "splits"
    del runs["b"][1].clients["w"]  # type: ignore[attr-defined]
    assert Verdict.of_runs(runs, natural=True).drawn == "splits"
    same = runs_of({id: [1.0, 2.0, 3.0] for id in "wxyz"}, tested="abc")
    assert Verdict.of_runs(same, natural=True).drawn == "fixed"
    others = {"a": [Scored(draw, draw, {f"{id}{draw}": 1.0 for id in "xyz"}) for draw in range(3)]}
    assert Verdict.of_runs(others, natural=True).drawn == "federations"
    trained = {name: [Scored(0, k, {"x": 1.0 + k, "y": 2}) for k in range(3)] for name in "ab"}
    assert Verdict.of_runs(trained, natural=True).drawn == "trainings"


def test_the_shares_of_runs_are_those_of_their_clients():
    """Two clients: Nadeau and Bengio's interval with the shares that the runs counted."""
    of = {"x": [1.0, 2.0, 3.5, 2.0], "y": [2.0, 1.0, 3.0, 4.0]}
    verdict = Verdict.of_runs(runs_of(of, shares={"x": 0.2, "y": 0.2}), natural=True)
    frame = table(np.stack([np.full((4, 2), 50.0), 50 + np.array([*of.values()]).T]), ["a", "b"])
    assert verdict.claims.equals(package.verdict(frame, drawn="splits", test_share=0.2).claims)
    assert "must be known" in str(Verdict.of_runs(runs_of(of), natural=True))


def test_all_lists_together_miss_in_one_of_twenty():
    """Where rules are known, pairs get 96 % and comparisons with rule 99 %."""
    runs = {name: [Scored(d, d, {"x": 50.0 + x}, rule={"x": 20.0 + d}) for d, x in enumerate(values)]
            for name, values in (("a", (0, 1, 2, 1)), ("b", (3, 4, 1, 6)))}  # fmt: skip
    verdict = Verdict.of_runs(runs)
    assert [pair.level for pair in verdict.column.pairs] == [0.96] and verdict.rule is not None
    assert {pair.level for pair in verdict.rule.pairs.values()} == {0.99}
    assert verdict.of_rules == ["average over the clients: a and b are shown to be above rule"]
    assert len(verdict.claims) == 3 and "96% those of pairs" in str(verdict)


def test_one_draw_speaks_with_one_voice():
    runs = {name: [Scored(0, 0, {"x": score}, rule={"x": 50.0})] for name, score in (("a", 49.0), ("b", 40.0))}
    verdict = Verdict.of_runs(runs)
    (line,) = verdict.of_rules
    assert line.endswith(
        "against rule, which trains nothing: cannot be known from 1 draw (observed: a by -1.0, b by -10.0)"
    )
    assert not [said for said in verdict.sentences if "cannot be known" not in said]


def test_false_claims_on_tables_of_the_study(monkeypatch):
    """Of 1,000 tables 50 may claim something (5 %; 28 to 73 with 99.9 % probability), and what the study judges at once
    is what the verdict says of each."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "studies"))
    study, rng = importlib.import_module("verdict"), np.random.default_rng(0)
    for name in ("normal", "re-split rows, these 5 clients", "draw effects, 8 clients"):
        shape = study.SHAPES[name]
        values = shape.make(rng, 1000, 10, (0.0,) * len(shape.effects))
        assert 0.028 <= study.claimed(values, shape.design) <= 0.073
        options = {"drawn": shape.design.drawn, "these_clients": shape.design.these, "test_share": 0.2}
        for one in values[:5]:
            ends = np.abs(study.intervals(one[None], shape.design)).min(axis=0)[0]
            known = package.verdict(table(one), **options).claims[["low", "high"]].abs().min(axis=1).dropna()
            assert sorted(known) == pytest.approx(sorted(ends[np.isfinite(ends)]), rel=1e-3)


def test_as_text_and_json(tmp_path):
    values = noise((3, 8, 4))
    values[2] += 6
    verdict = package.verdict(table(values), drawn="federations")
    text = verdict.as_markdown()
    assert text.startswith("\n## Verdict\n") and "- m2 > m0 by " in text and "who looks after each draw" in text
    data = json.loads(json.dumps(verdict.as_json()))
    assert data["columns"]["average"]["bold"] == ["m2"] and len(data["columns"]["average"]["pairs"]) == 3
    assert data["sentences"] == verdict.sentences and verdict.for_terminal()[0] == verdict.sentences[0]
    drawn = plots.plot_verdict(tmp_path / "v.svg", verdict.column).read_text()
    for words in ("m2 − m1", "unresolved", "claimed: the interval excludes 0", "average over the clients"):
        assert f"<!-- {words} -->" in drawn


REFUSED = {
    "no column": (lambda f: f.drop(columns="client"), {}, "no column 'client'"),
    "nothing": (lambda f: f[:0], {}, "no line"),
    "infinite": (
        lambda f: f.assign(score=math.inf),
        {},
        r"line 1 below the head \(m0, 0, c0, inf\) has a score that is no points",
    ),
    "words": (lambda f: f.assign(score="high"), {}, "c0, high\\) has a score"),
    "twice": (lambda f: pd.concat([f, f[:1]]), {}, "has the row, draw and client of another"),
    "no name": (lambda f: f.assign(client=None), {}, "lacks its row, draw or client"),
    "share 0": (lambda f: f, {"test_share": 0}, "the test share of c0 is 0"),
    "share 1": (lambda f: f, {"test_share": {"c0": 1, "c1": 0.5}}, "the test share of c0 is 1"),
    "a share lacks": (lambda f: f, {"test_share": {"c0": 0.5}}, "no share of client c1"),
    "unknown": (lambda f: f, {"drawn": "rows"}, "it takes federations, splits, fixed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    change, options, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        package.verdict(change(table(noise((2, 3, 2)))), **{"drawn": "splits", **options})


ONE_SCORE = st.one_of(st.sampled_from([0.0, 50.0, 100.0, 50.0 + 1e-12]), st.floats(0, 100), st.none())


@given(
    data=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.sampled_from("vwxyz"), ONE_SCORE),
                  min_size=1, max_size=60, unique_by=lambda line: line[:3]),
    drawn=st.sampled_from(["federations", "splits", "fixed", "trainings"]), share=st.sampled_from([None, 0.2, 0.999]),
    these=st.booleans(),
)  # fmt: skip
def test_any_table_has_a_defined_verdict(data, drawn, share, these):
    """Unequal draws, missing clients, one client, equal and undefined scores: an interval or a sentence, never NaN in
    a claim."""
    frame = pd.DataFrame(data, columns=["row", "draw", "client", "score"])
    verdict = package.verdict(frame, drawn=drawn, test_share=share, these_clients=these)
    for line in verdict.claims.itertuples(index=False):
        assert math.isnan(line.low) == math.isnan(line.high)
        assert line.shown == (line.low > 0) and not line.low > line.difference > line.high
    text = str(verdict)
    assert text and "nan" not in text and "inf" not in text
    json.dumps(verdict.as_json(), allow_nan=False)
