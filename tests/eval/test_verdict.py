"""The verdict: an interval by hand, who is best, and how often it is wrong on made-up tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import pytest

from llm_fed.eval import forest
from llm_fed.eval.pairs import MethodPair, compare_methods, reference
from llm_fed.eval.verdict import Scored, Verdict, last_round
from llm_fed.settings.config import Config, EvalConfig


def scores(**methods: Sequence[float]) -> dict[str, dict[tuple[int, int], float]]:
    """By method the score of draw 0, 1, ..."""
    return {name: {(draw, 0): value for draw, value in enumerate(values)} for name, values in methods.items()}


def scored_run(seed: int, clients: Mapping[str, float], **changes) -> Scored:
    ordered = sorted(clients.values())
    worst = fmean(ordered[: (len(ordered) + 1) // 2])
    return Scored(**{"federation": seed, "training": seed, "clients": clients, "average": fmean(ordered),
                     "worst_half": worst, **changes})  # fmt: skip


def runs(values: np.ndarray) -> Verdict:
    """Of (methods, draws, clients)."""
    return Verdict(
        {
            f"m{number}": [scored_run(draw, {f"c{i}": x for i, x in enumerate(row)}) for draw, row in enumerate(method)]
            for number, method in enumerate(values.tolist())
        }
    )


def test_an_interval_by_hand():
    """d = 1, 2, 3: mean 2, sd 1, and Student's t of 2 degrees of freedom at 97.5 % is 4.303: 2 ± 4.303 / sqrt(3) =
    2 ± 2.484. With d = 1, 2, 3, 2: sd sqrt(2 / 3), t of 3 is 3.182: 2 ± 3.182 sqrt(2 / 3) / 2 = 2 ± 1.299.
    The tables behind the interval give its width to 1 %."""
    (pair,) = compare_methods(scores(a=[0, 0, 0], b=[1, 2, 3])).pairs
    assert (pair.first, pair.second, pair.difference, pair.sd, pair.draws) == ("b", "a", 2, 1, 3)
    assert (pair.low, pair.high) == pytest.approx((-0.484, 4.484), abs=0.03) and pair.claim == "unresolved"
    assert str(pair).startswith("b ~ a: unresolved, 2.00 [-0.4") and str(pair).endswith("about 2 more draws")
    (pair,) = compare_methods(scores(a=[0, 0, 0, 0], b=[1, 2, 3, 2])).pairs
    assert (pair.low, pair.high) == pytest.approx((0.701, 3.299), abs=0.03) and pair.claim == "greater"
    assert str(pair).startswith("b > a by 2.00 [0.") and pair.p == pytest.approx(0.016, abs=0.002)


@pytest.mark.parametrize("draws, quantile", [(3, 4.3027), (5, 2.7764), (10, 2.2622), (200, 1.9720)])
def test_two_methods_are_students_t(draws, quantile):
    """Its tables at 97.5 %."""
    assert np.quantile(reference(2, draws), 0.95) == pytest.approx(quantile, rel=0.01)


def test_many_draws_are_tukeys_range():
    """Without doubt about the deviations the largest |t| of M means is the studentised range over sqrt(2): tables have
    3.633 and 4.286 for 4 and 8 means at 95 %."""
    for methods, value in ((4, 3.633), (8, 4.286)):
        assert np.quantile(reference(methods, 100_000), 0.95) == pytest.approx(value / 2**0.5, rel=0.01)


@pytest.mark.parametrize("effect, draws", [(1.0, 10), (0.5, 34), (0.2, 199)])
def test_draws_that_a_difference_needs(effect, draws):
    """Paired t tests at 5 % and 80 % power: the sizes that every table of sample sizes has."""
    pair = MethodPair("a", "b", 5, effect, -1, 3, 1.0, 0.5, methods=2)
    assert pair.more == pytest.approx(draws - 5, abs=1 + 0.02 * draws)
    assert MethodPair("a", "b", 5, 0.01, -1, 3, 1.0, 0.5, methods=2).more is None
    assert "more than 1,000 more draws" in str(MethodPair("a", "b", 5, 0.01, -1, 3, 1.0, 0.5, methods=2))


def test_what_cannot_be_known():
    """Two draws; differences that are all alike, of which a deviation would be 0; and no common draw."""
    (two,) = compare_methods(scores(a=[1, 9], b=[2, 10.1])).pairs
    assert two.claim == "unknown" and two.low is None and "cannot be known from 2 draws" in str(two)
    (alike,) = compare_methods(scores(a=[1, 2, 3], b=[2, 3, 4])).pairs
    assert alike.claim == "unknown" and "all differ by exactly 1.00" in str(alike)
    column = compare_methods(scores(a=[1.5, 2, 3], b=[1.5, 2, 3]))
    assert str(column.pairs[0]) == "a = b in each of 3 draws" and column.best == [] and not column.known
    column = compare_methods({"a": {(0, 0): 1.0}, "b": {(1, 0): 2.0}})
    assert str(column.pairs[0]) == "b ? a: no common draw"
    one = runs(np.array([[[1.0, 2.0]], [[3.0, 5.0]]]))
    assert "cannot be known from 1 draw; at least 3" in one.sentences[0] and one.bold("average") == []
    assert Verdict({}).sentences == [] and Verdict({}).as_markdown() == ""


def test_equal_in_practice():
    (pair,) = compare_methods(scores(a=[50, 60, 70, 55], b=[50.1, 60, 70.1, 55])).pairs
    assert pair.claim == "equal" and str(pair).startswith("b = a to within 0.5: 0.05 [-0.0")


def test_who_is_best():
    """a and b differ by noise alone, and both beat c by ten points."""
    noise = np.array([0.3, -0.5, 0.2, -0.1, 0.4, -0.3])
    column = compare_methods(scores(c=50 - noise, a=60 + noise, b=60.1 - noise[::-1]))
    assert column.leaders == column.best == ["b", "a"] and "among b and a" in column.headline
    column = compare_methods(scores(a=60 + noise, c=50 - noise))
    assert column.best == ["a"] and column.headline.startswith("a is best")
    column = compare_methods(scores(a=60 + noise, b=60.1 - noise))
    assert (column.leaders, column.best) == (["b", "a"], []) and "no winner can be named" in column.headline


def test_a_missing_draw_is_left_out_of_its_pairs_alone():
    """b lacks draw 1, in which the others score far higher."""
    values = scores(a=[50, 90, 52, 51], c=[40, 80.5, 41.5, 40.5])
    values["b"] = {(0, 0): 45.0, (2, 0): 47.5, (3, 0): 45.5}
    by_name = {(pair.first, pair.second): pair for pair in compare_methods(values).pairs}
    assert by_name["a", "c"].draws == 4 and by_name["a", "b"].draws == 3
    assert by_name["a", "b"].difference == pytest.approx((5 + 4.5 + 5.5) / 3)


def test_training_seeds_of_a_federation_are_one_draw():
    """Three federations with four training seeds each are three draws, not twelve."""
    rng = np.random.default_rng(0)
    found: dict[str, list[Scored]] = {"a": [], "b": []}
    for federation in range(3):
        shift = rng.normal(0, 3)
        for training in range(4):
            for name, runs_of in found.items():
                value = 50 + shift * (name == "a") + rng.normal(0, 0.1)
                runs_of.append(scored_run(federation, {"x": value, "y": value + 1}, training=training))
    (pair,) = Verdict(found).columns["average"].pairs
    assert pair.draws == 3 and pair.claim == "unresolved"


def test_one_federation_with_several_training_seeds_says_so():
    found = {
        name: [scored_run(5, {"x": base + k % 2, "y": base}, training=k) for k in range(6)]
        for name, base in (("a", 10.0), ("b", 12.5))
    }
    found["b"] = [scored_run(5, {"x": 12.5 + k % 3, "y": 12.5}, training=k) for k in range(6)]
    verdict = Verdict(found)
    assert verdict.one_federation and verdict.columns["average"].pairs[0].draws == 6
    assert any("this federation alone" in line for line in verdict.method)


def equal_methods(rng: np.random.Generator, draws: int, effects: Sequence[float]) -> np.ndarray:
    """(methods, draws, 8 clients) whose noise is half a run's, which moves its clients together, half each client's."""
    of_run = rng.normal(0, 1.5, (len(effects), draws, 1))
    return 50 + np.reshape(effects, (-1, 1, 1)) + of_run + rng.normal(0, 3, (len(effects), draws, 8))


@pytest.mark.parametrize("draws", [3, 6])
def test_false_claims_and_coverage_on_hundreds_of_tables(draws):
    """Of 400 tables of four equal methods 20 may claim something (5 %; 8 to 34 with 99.9 % probability), and of 400 of
    unequal ones as many may have an interval beside its true difference. Clients as replications give 90 or more, and
    so do pairs that are not corrected for."""
    rng = np.random.default_rng(draws)
    claims = sum(
        any(pair.claim == "greater" for pair in runs(equal_methods(rng, draws, [0] * 4)).columns["average"].pairs)
        for _ in range(400)
    )
    assert 8 <= claims <= 34
    effects, missed = (0.0, 1.0, 2.0, 4.0), 0
    for _ in range(400):
        pairs = runs(equal_methods(rng, draws, effects)).columns["average"].pairs
        truth = [effects[int(pair.first[1:])] - effects[int(pair.second[1:])] for pair in pairs]
        missed += not all(pair.low <= true <= pair.high for pair, true in zip(pairs, truth, strict=True))
    assert 8 <= missed <= 34


def test_a_claim_is_an_interval_without_zero_is_a_small_p():
    rng = np.random.default_rng(1)
    pairs = [pair for _ in range(30) for pair in runs(equal_methods(rng, 5, (0, 2, 4))).columns["average"].pairs]
    assert 10 < sum(pair.claim == "greater" for pair in pairs) < 80
    assert all((pair.claim == "greater") == (pair.low > 0) == (pair.p < 0.05) for pair in pairs)


def test_the_last_round_counts_where_all_runs_of_a_method_have_it():
    """Where some have it by chance, it would be a choice of runs."""

    def made(missing: bool) -> Verdict:
        found = {}
        for name, base in (("a", 50.0), ("b", 55.0)):
            found[name] = [
                scored_run(k, {"x": base + k % 3, "y": base - 2 * (k % 2)},
                       last={"split": "validation", "average": base + k % 2, "worst_half": base - k % 3})
                for k in range(4)
            ]  # fmt: skip
        if missing:
            found["a"][2] = scored_run(2, {"x": 52.0, "y": 50.0})
        return Verdict(found)

    verdict = made(missing=False)
    assert list(verdict.columns) == ["average", "worst_half", "last_average", "last_worst_half"]
    assert verdict.title("last_average") == "average over the clients, last round, validation examples"
    assert list(made(missing=True).columns) == ["average", "worst_half"]


def test_the_last_round_is_that_of_the_scores_as_they_are_made_now(tmp_path):
    """Its score before eval.metric was changed is another quantity; the one after it is no score of training."""
    known = {"split": "test", "metric": "rouge1", "clients": {"ada": 90.0}}
    score = {"kind": "score", "round": 3, **known, "mean": 90.0, "worst_half": 80.0}
    lines = [score, {"kind": "search anew", "round": 3}, score | {"mean": 50.0, "worst_half": 40.0}, score]
    path = tmp_path / "metrics.jsonl"
    config = Config(rounds=3, eval=EvalConfig(during="test", select="best"))
    for count, expected in ((1, (90.0, 80.0)), (2, None), (3, (50.0, 40.0)), (4, (50.0, 40.0))):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines[:count]))
        found = last_round(tmp_path, config)
        assert (found and (found["average"], found["worst_half"])) == expected


def test_as_text_and_json(tmp_path):
    rng = np.random.default_rng(0)
    verdict = runs(equal_methods(rng, 8, (0, 0, 6)))
    text = verdict.as_markdown()
    assert text.startswith("\n## Verdict\n") and "- m2 > m0 by " in text.replace("m1", "m0")
    assert "who looks after each draw" in text and all(
        part in text for part in map(str, verdict.columns["average"].pairs)
    )
    data = verdict.as_json()
    assert data["columns"]["average"]["bold"] == ["m2"] and len(data["columns"]["average"]["pairs"]) == 3
    assert data["sentences"] == verdict.sentences and verdict.for_terminal()[0] == verdict.sentences[0]
    path = forest.plot_verdict(tmp_path / "v.svg", verdict.judged)
    drawn = path.read_text()
    for words in ("m2 − m1", "unresolved", "claimed: the interval excludes 0", "worst half of the clients"):
        assert f"<!-- {words} -->" in drawn


def natural(differences: Mapping[str, Sequence[float]], **options) -> Verdict:
    """Two methods on the same clients; by client by how much `b` is above `a` in each draw."""
    draws = range(len(next(iter(differences.values()))))
    found = {
        "a": [scored_run(draw, dict.fromkeys(differences, 50.0)) for draw in draws],
        "b": [scored_run(draw, {id: 50 + of[draw] for id, of in differences.items()}) for draw in draws],
    }
    return Verdict(found, **{"natural": True} | options)


def test_natural_clients_are_a_sample_of_their_own():
    """b is 1 above a at one client of four and equal at the others, in each draw to within a tenth: draws of the same
    clients decide it, clients as the sample do not. By hand: d = 1, 0, 0, 0, mean 0.25, sd 0.5, t of 3 is 3.182."""
    noise = [0.1, -0.1, 0.0, 0.0]
    verdict = natural({"w": [1 + e for e in noise], "x": noise, "y": noise, "z": noise})
    assert verdict.drawn == "splits" and verdict.columns["average"].pairs[0].claim == "greater"
    assert verdict.over_clients is not None
    (pair,) = verdict.over_clients.pairs
    assert (pair.draws, pair.unit, pair.claim) == (4, "client", "unresolved")
    assert (pair.difference, pair.low, pair.high) == pytest.approx((0.25, 0.25 - 0.7955, 0.25 + 0.7955), abs=0.01)
    said = verdict.as_json()
    assert said["drawn"] == "splits" and said["over_clients"]["pairs"][0]["unit"] == "client"
    for text in (verdict.as_markdown(), "\n".join(verdict.for_terminal()), "\n".join(verdict.sentences)):
        assert "with the clients as the sample" in text and "more clients" in text
    assert any("clients are the same in each draw" in line for line in verdict.method)


def test_clients_that_a_seed_draws_are_no_sample():
    """A partition, or other names in another draw; one federation with several trainings; too few clients."""
    of = {"x": [1.0, 2, 3], "y": [2.0, 1, 3], "z": [0.0, 1, 1]}
    assert natural(of).over_clients and natural(of, natural=False).over_clients is None
    assert (
        natural(of, natural=False).drawn == "federations"
        and natural(of, natural=False).as_json()["over_clients"] is None
    )
    others = {
        name: [scored_run(draw, {f"{id}{draw}": 1.0 + draw * k for k, id in enumerate("xyz")}) for draw in range(3)]
        for name in "ab"
    }
    assert Verdict(others, natural=True).drawn == "federations"
    trained = {name: [scored_run(0, {"x": 1.0 + k, "y": 2}, training=k) for k in range(3)] for name in "ab"}
    assert Verdict(trained, natural=True).drawn == "trainings"
    assert natural({"x": [1.0, 2, 3], "y": [2.0, 1, 3]}).over_clients is None


def test_a_client_that_one_draw_lacks_counts_with_its_other_draws():
    found = {
        name: [scored_run(draw, {"x": 1.0 + up, "y": 2.0 + 2 * up, "z": 4.0 + up}) for draw in range(3)]
        for name, up in (("a", 0.0), ("b", 1.0))
    }
    del found["b"][1]
    verdict = Verdict(found, natural=True)
    assert verdict.over_clients is not None and verdict.over_clients.pairs[0].difference == pytest.approx(4 / 3)


def test_one_draw_says_that_its_clients_have_its_noise_in_common():
    verdict = natural({"x": [1.0], "y": [2.0], "z": [0.5]})
    assert verdict.over_clients is not None and verdict.columns["average"].pairs[0].claim == "unknown"
    assert any("claim too much" in line for line in verdict.method)
    for text in (verdict.as_markdown(), "\n".join(verdict.for_terminal()), str(verdict.as_json())):
        assert "clients as the sample, which claims too much from so few draws" in text
    enough = natural({"x": [1.0, 1.1, 1.2], "y": [2.0, 1.9, 2.0], "z": [0.5, 0.4, 0.6]})
    assert enough.over_clients and "claims too much" not in enough.as_markdown()
