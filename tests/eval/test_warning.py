"""Warnings: each kind where it belongs, silence where nothing is wrong, and rates of false ones."""

import numpy as np
import pytest

from llm_fed.eval.warning import ALARM, KINDS, Cross, Scores, level_of, sentences, warnings_of

CLIENTS = ("bank", "hotel", "clinic", "shop", "desk")


def kinds(found):
    return {warned["kind"]: warned["clients"] for warned in found}


def own_scores(rng, mean=60.0, clients=CLIENTS, count=20):
    examples = {id: np.clip(rng.normal(mean, 20, count), 0, 100).tolist() for id in clients}
    return Scores({id: float(np.mean(values)) for id, values in examples.items()}, examples)


def table(rng, swapped=None, own=60.0, others=20.0, count=20):
    """Models that are good on their own examples; `swapped` maps a client to the one whose model it has instead."""
    real = {id: (swapped or {}).get(id, id) for id in CLIENTS}
    answers = {
        (model, id): np.clip(rng.normal(own if real[model] == id else others, 15, count), 0, 100).tolist()
        for model in CLIENTS
        for id in CLIENTS
    }
    return Cross(answers, {id: np.clip(rng.normal(10, 8, count), 0, 100).tolist() for id in CLIENTS})


@pytest.mark.parametrize("name", ("base", "rule", "local"))
def test_a_client_below_a_reference_is_named_with_figures(name):
    own, reference = own_scores(np.random.default_rng(0)), own_scores(np.random.default_rng(1))
    examples = {**reference.examples, "hotel": [min(100.0, value + 45) for value in own.examples["hotel"]]}
    reference = Scores({id: float(np.mean(values)) for id, values in examples.items()}, examples)
    (warned,) = warnings_of(own, {name: reference}, {id: len(values) for id, values in own.examples.items()})
    assert (warned["kind"], warned["clients"]) == (f"below-{name}", ["hotel"])
    its = warned["figures"]["hotel"]
    assert its["high"] < 0 and its["low"] < its["difference"] < its["high"] and its["examples"] == 20
    assert "hotel (" in warned["text"] and "over 20 examples" in warned["text"]
    assert sentences([warned], "hotel") == [f"{warned['text'].capitalize().replace('Hotel', 'hotel')}."] or sentences(
        [warned], "hotel"
    )[0].startswith(KINDS[f"below-{name}"].capitalize())
    assert sentences([warned], "bank") == []


def test_without_single_examples_the_interval_is_wider_and_a_large_difference_still_shows():
    own, base = Scores({"a": 20.0, "b": 50.0}), Scores({"a": 80.0, "b": 55.0})
    assert kinds(warnings_of(own, {"base": base}, {"a": 30, "b": 30})) == {"below-base": ["a"]}
    assert warnings_of(own, {"base": base}, {"a": 4, "b": 4}) == []


def test_a_client_with_the_model_of_another_is_found_in_the_table():
    found = kinds(warnings_of(Scores({}), {}, {}, table(np.random.default_rng(0), {"hotel": "bank"})))
    assert found == {"gains-elsewhere": ["hotel"]}


def test_two_exchanged_models_are_better_at_each_other():
    warned = warnings_of(Scores({}), {}, {}, table(np.random.default_rng(0), {"hotel": "bank", "bank": "hotel"}))
    assert kinds(warned) == {"another-model": ["bank", "hotel"], "gains-elsewhere": ["bank", "hotel"]}
    assert warned[0]["figures"]["hotel"]["model"] == "bank"
    assert warned[1]["figures"]["bank"]["examples_of"] == "hotel"


def test_without_a_base_the_edge_over_the_others_decides():
    warned = warnings_of(Scores({}), {}, {}, Cross(table(np.random.default_rng(0), {"hotel": "bank"}).answers))
    assert kinds(warned) == {"gains-elsewhere": ["hotel"]}
    assert warned[0]["figures"]["hotel"]["over"] == "other models"


def test_an_easier_client_is_no_warning():
    """Every model gains more on the bank's examples, of which the base knows nothing, but none more than its own."""
    rng, healthy = np.random.default_rng(0), table(np.random.default_rng(3))
    answers = {
        (model, id): [min(100.0, value + (35 if id == "bank" else 0)) for value in values]
        for (model, id), values in healthy.answers.items()
    }
    base = {
        id: (healthy.base[id] if id == "bank" else np.clip(rng.normal(50, 10, 20), 0, 100).tolist()) for id in CLIENTS
    }
    assert warnings_of(Scores({}), {}, {}, Cross(answers, base)) == []


def test_parts_of_a_table_are_enough():
    """Over a network only the models of one machine's clients are tried there."""
    cross = table(np.random.default_rng(0), {"hotel": "bank", "bank": "hotel"})
    here = {pair for pair in cross.answers if {*pair} <= {"bank", "hotel"} or pair[0] == pair[1]}
    part = Cross({pair: cross.answers[pair] for pair in here}, cross.base)
    assert sorted(kinds(warnings_of(Scores({}), {}, {}, part))["another-model"]) == ["bank", "hotel"]


def test_a_loss_that_rises_while_the_mean_falls():
    rng, rounds = np.random.default_rng(0), range(1, 31)
    losses = {id: {r: 3 - 0.05 * r + rng.normal(0, 0.05) for r in rounds} for id in CLIENTS}
    assert warnings_of(Scores({}), {}, {}, losses=losses) == []
    losses["hotel"] = {r: 1.5 + 0.03 * r + rng.normal(0, 0.05) for r in rounds}
    (warned,) = warnings_of(Scores({}), {}, {}, losses=losses)
    assert (warned["kind"], warned["clients"]) == ("loss-rises", ["hotel"])
    rising = {id: {r: 1.5 + 0.03 * r for r in rounds} for id in CLIENTS}
    assert warnings_of(Scores({}), {}, {}, losses=rising) == []  # all learn by heart: no client is apart
    assert warnings_of(Scores({}), {}, {}, losses={id: {1: 2.0, 2: 3.0} for id in CLIENTS}) == []


def test_where_training_has_converged_no_loss_rises_while_the_mean_falls():
    """The mean goes up and down around a level, a little lower at its end; one client's loss creeps up."""
    rounds = range(1, 41)
    flat = {r: 1.0 + 0.02 * (-1) ** r - 0.0001 * r for r in rounds}
    losses = {
        "bank": flat,
        "hotel": {r: 0.5 + 0.0005 * r for r in rounds},
        "zoo": {r: v - 0.001 * r for r, v in flat.items()},
    }
    assert warnings_of(Scores({}), {}, {}, losses=losses) == []


def test_a_text_names_five_clients_at_most():
    ids = [f"c{number}" for number in range(9)]
    own, base = Scores(dict.fromkeys(ids, 0.0)), Scores(dict.fromkeys(ids, 100.0))
    (warned,) = warnings_of(own, {"base": base}, dict.fromkeys(ids, 40))
    assert warned["clients"] == ids and warned["text"].endswith("; and 4 more clients")


def test_intervals_share_the_alarm():
    assert level_of(1) == pytest.approx(1 - 2 * ALARM / len(KINDS))
    assert level_of(20) > level_of(2)


@pytest.mark.parametrize("mean", (5.0, 50.0, 95.0))
@pytest.mark.parametrize("right_or_wrong", (False, True))
def test_equal_models_hardly_ever_warn(mean, right_or_wrong):
    """All models and the base answer alike, so any warning is false; fifty runs of five clients."""
    rng, alarms = np.random.default_rng(int(mean)), 0

    def scores(count=20):
        if right_or_wrong:
            return (100.0 * (rng.random(count) < mean / 100)).tolist()
        return np.clip(rng.normal(mean, 25, count), 0, 100).tolist()

    for _ in range(50):
        own, base = ({id: scores() for id in CLIENTS} for _ in range(2))
        cross = Cross({(k, i): own[i] if k == i else scores() for k in CLIENTS for i in CLIENTS}, base)
        means = [Scores({id: float(np.mean(v)) for id, v in its.items()}, its) for its in (own, base)]
        alarms += bool(warnings_of(means[0], {"base": means[1]}, dict.fromkeys(CLIENTS, 20), cross))
    assert alarms <= 4
