"""Warnings over a network: each node looks at its own clients, and the server believes figures alone."""

import json
from typing import Any

import pytest
from network import NETWORK, federate, tree
from small_run import CLIENTS, Small, write_data

from llm_fed.experiment import run as experiment
from llm_fed.experiment.watching import believed
from llm_fed.network.link import Reply, summary_of
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")
NODES = (("ada", "bob"), ("cyd",))


@pytest.fixture
def larger(small, tmp_path):
    return Small(small.base, write_data(tmp_path / "data", {"train": 6, "validation": 2, "test": 8}), scored={})


def settings(small, **changes: Any) -> dict[str, Any]:
    network = {**NETWORK, "clients": ["ada", "bob@ada", "cyd"], "wait": 20.0, "deadline": 60.0, "patience": 60.0}
    return tree(small, rounds=1, method={"name": "fedmerge"}, network=network, **changes)


def test_scores_of_the_base_and_warnings_are_those_of_one_process(larger, tmp_path):
    _, done = federate(tmp_path / "there", larger, settings(larger), nodes=NODES)
    assert not (tmp_path / "there/run/cross.json").exists()  # no personal model travels
    experiment.train(from_dict(settings(larger)), tmp_path / "here")
    here = json.loads((tmp_path / "here/summary.json").read_text())
    assert done["base"] == here["base"] and done["base"]["losses"].keys() == CLIENTS.keys()
    assert {warned["kind"] for warned in done["warnings"]} <= {"below-rule"}  # one round teaches hardly anything
    assert "the base alone" in (tmp_path / "there/run/report.html").read_text()


def test_with_privacy_nothing_of_examples_is_said(larger, tmp_path):
    private = settings(larger, privacy={"clip": 1.0, "noise": 1.0, "where": "client"})
    private["method"] = {"name": "fedit"}
    _, done = federate(tmp_path / "there", larger, private, nodes=NODES)
    assert "base" not in done and any("privacy.clip" in text for text in done["unchecked"])
    assert not (tmp_path / "there/run/cross.json").exists()


def test_what_a_client_says_is_believed_only_where_it_can_be():
    good = {"score": 10.0, "base": 50.0, "difference": -40.0, "low": -60.0, "high": -20.0, "examples": 20}
    (warned,) = believed({"ada": {"below-base": good}}, CLIENTS)
    assert warned["clients"] == ["ada"] and warned["figures"]["ada"] == good
    for bad in (
        {**good, "low": "x"},
        {**good, "low": float("nan")},
        {**good, "high": True},
        {},
        5,
        {**good, "score": 1e9},
    ):
        assert believed({"ada": {"below-base": bad}}, CLIENTS) == []
    assert believed({"ada": {"<script>": good}}, CLIENTS) == []
    other = {"own": 1.0, "other": 2.0, "difference": 1.0, "low": 0.5, "high": 2.0, "examples": 9, "model": "mallory"}
    for model in ("mallory", ["bob"], 5):
        assert believed({"ada": {"another-model": {**other, "model": model}}}, CLIENTS.keys()) == []
    assert believed({"ada": {"another-model": {**other, "model": "bob"}}}, CLIENTS.keys())
    assert Reply({"warnings": [1]}).warned == {}
    assert Reply({"tested": 12}).tested == 12 and Reply({"tested": -1}).tested == 0
    for bad in (5, [1], None, {"score": 101}, {"score": "1"}, {"loss": 1.0}):
        assert summary_of("rouge1", {"ada": Reply({"of_base": bad}).of_base}) is None
