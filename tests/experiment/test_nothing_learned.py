"""A run in which no update counts says so at its end, instead of only showing the scores of an untrained model."""

from __future__ import annotations

import json

import pytest

from llm_fed.experiment.finish import UNMOVED

# No step is ever taken: the buffer does not fill, all answers are too late, or none arrives.
NEVER = [
    ["method=fedbuff", "method.buffer=100"],
    ["method=ca2fl", "method.buffer=100"],
    ["method=fedavg", "method.wait=deadline", "delay.sigma=1000"],
    ["method=fedasync", "delay.sigma=1000"],
    ["method=fedavg", "delay.drop_out=0.999"],
]


def events(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "event"]


@pytest.mark.parametrize("words", NEVER, ids=" ".join)
def test_an_untrained_model_is_called_one(small, tmp_path, llm_fed, words):
    said = llm_fed("run", small.config(tmp_path / "c.yaml", rounds=2), *words, "--out", tmp_path / "out")
    assert said.code == 0 and "nothing learned: the tested models are those that the run began with" in said.err
    (event,) = events(tmp_path / "out")
    assert (event["round"], event["event"], event["reason"]) == (2, "nothing learned", UNMOVED)
    assert "nothing learned" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize("words", [["method=fedbuff", "method.buffer=6"], ["method=local"], ["adapter.rank=1"]])
def test_one_step_is_enough(small, tmp_path, llm_fed, words):
    """Two rounds of three clients fill a buffer of six once."""
    assert llm_fed("run", small.config(tmp_path / "c.yaml", rounds=2), *words, "--out", tmp_path / "out").code == 0
    assert not events(tmp_path / "out")


def test_more_answers_than_clients_are_not_waited_for(small, tmp_path, llm_fed):
    words = ["method=fedavg", "method.wait=first_n", "method.wait_for=4", "--out", tmp_path / "out"]
    refused = llm_fed("run", small.config(tmp_path / "c.yaml"), *words)
    refused.assert_refused("method.wait_for=4 answers to one model never come from 3 clients; lower it")
