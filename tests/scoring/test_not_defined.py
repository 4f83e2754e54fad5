"""A score that is not defined for a client is no 0: it is named, counts in no mean, and never ends a run."""

import json

import every
import outside
import pytest

from llm_fed.runs.reading import finished
from llm_fed.settings import plugins

METRIC = """
def score(*, predictions, references):
    return {value} if references[0] in {words} else 50.0
"""
EVERYBODY = ("w4 w5", "w7 w8", "w10 w11")


VALUES = ["None", "float('nan')", "[None] * len(references)"]


@pytest.mark.parametrize("value", every.quick(VALUES, VALUES[:1]))
def test_a_client_for_whom_an_own_metric_says_nothing(small, here, llm_fed, value):
    outside.module(here, "odd", METRIC.format(value=value, words=("w4 w5",)))
    config = small.config(here / "c.yaml", rounds=1, eval={"metric": "odd:score"})
    said = llm_fed("compare", config, "--methods", "local,fedit", "--out", here / "out")
    assert said.code == 0 and "odd:score is not defined here, and counts in no mean, for ada" in said.out
    with plugins.allowing(["odd:score"]):
        scores = finished(here / "out/local-seed0")["scores"]
    assert scores["clients"] == {"bob": 50.0, "cyd": 50.0} and scores["mean"] == 50.0
    assert scores["undefined"] == scores["unscored"] == ["ada"]
    assert "not defined here" in (here / "out/table.md").read_text()
    assert "not defined here" in (here / "out/local-seed0/report.html").read_text()


def test_a_metric_that_is_defined_for_nobody_ends_no_run(small, here, llm_fed):
    outside.module(here, "odd", METRIC.format(value="None", words=EVERYBODY))
    config = small.config(here / "c.yaml", rounds=1, eval={"metric": "odd:score"})
    said = llm_fed("compare", config, "--methods", "local,fedit", "--out", here / "out")
    assert said.code == 0 and "is not defined here, and counts in no mean, for ada, bob, cyd" in said.out
    table = json.loads((here / "out/table.json").read_text())
    assert [row["average"] for row in table["rows"]] == [None, None]
