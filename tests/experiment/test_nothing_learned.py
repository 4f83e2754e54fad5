"""A run in which no update counts says so at its end, instead of only showing the scores of an untrained model."""

import pytest

from llm_fed.experiment.finish import UNMOVED
from llm_fed.runs.records import read_records

# No step is ever taken: the buffer does not fill, all answers are too late, or none arrives.
NEVER = [
    ["method=fedbuff", "method.buffer=100"],
    ["method=ca2fl", "method.buffer=100"],
    ["method=fedavg", "method.wait=deadline", "delay.sigma=1000"],
    ["method=fedasync", "delay.sigma=1000"],
    ["method=fedavg", "delay.drop_out=0.999"],
]


def events(folder):
    return [line for line in read_records(folder / "metrics.jsonl") if line["kind"] == "event"]


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


def test_compare_says_below_its_table_what_went_wrong(small, tmp_path, llm_fed):
    """One of three uploads in each of two rounds is longer than the middle one; a buffer of 100 is never full."""
    rows = {"never": NEVER[0], "strict": ["method=fedit", "norm_bound=1.0001"], "well": []}
    config = small.config(tmp_path / "c.yaml", rounds=2, local={"steps": 4}, compare={"seeds": [0], "rows": rows})
    assert llm_fed("compare", config, "--out", tmp_path / "out").code == 0
    lines = (tmp_path / "out/table.md").read_text().splitlines()
    assert [line for line in lines if "the report in its folder" in line] == [
        "- never, seed 0: nothing learned; the report in its folder says more.",
        "- strict, seed 0: refused upload (2 times); the report in its folder says more.",
    ]
