"""What a run with DoRA exports is scored as in the run."""

from __future__ import annotations

import json

import pytest

from llm_fed.experiment import run as experiment
from llm_fed.settings.configfile import from_dict

pytestmark = pytest.mark.usefixtures("quick")


def test_an_exported_dora_adapter_scores_as_in_its_run(small, tmp_path, llm_fed):
    tree = small.tree(rounds=1, method={"name": "local"})
    tree["adapter"] = {**tree.get("adapter", {}), "dora": True}
    own = experiment.train(from_dict(tree), tmp_path / "run")["scores"]["clients"]["ada"]
    data = ("--data", small.data / "ada/test.jsonl", "--template", "plain", "--json")
    said = llm_fed("eval", "--base", small.base, "--adapter", tmp_path / "run/adapters/ada", *data)
    assert said.code == 0, said.err
    assert list(json.loads(said.out)["clients"].values()) == [pytest.approx(own, abs=0.01)]
