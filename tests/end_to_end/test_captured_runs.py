"""Runs with engine.capture=on, on a CPU: the training that they were, what they record, and how they go on."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from pass_runs import CHANGES, adapters, apart, passes

from llm_fed.engine import capture
from llm_fed.engine.capture import Captures, in_words
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile


def test_a_captured_run_is_the_run_and_says_what_it_did(small, tmp_path, llm_fed):
    """Nearly every micro-batch is replayed once its shape has come often enough, in later rounds too."""
    config = small.config(tmp_path / "c.yaml", **CHANGES)
    plain, captured = tmp_path / "plain", tmp_path / "captured"
    said = llm_fed("run", config, "--out", plain)
    assert said.code == 0 and "passes" not in said.err
    said = llm_fed("run", config, "engine.capture=on", "--out", captured)
    assert said.code == 0 and "passes     in fixed shapes (engine.capture=on), which gains nothing on cpu" in said.err
    assert not passes(plain) and len(counts := passes(captured)) == 3
    assert counts[0]["as written"] >= capture.USES and counts[2]["as written"] == 0 < counts[2]["replayed"]
    assert 0 <= apart(adapters(plain), adapters(captured)) < 5e-6
    known = [json.loads((folder / "environment.json").read_text())["captured"] for folder in (plain, captured)]
    assert known == [False, True]
    audit = llm_fed("audit", captured)
    assert audit.code == 0 and "another environment" not in audit.out + audit.err


def test_a_run_that_began_as_written_may_go_on_captured(small, tmp_path, llm_fed):
    """It says that the last bits may differ, and its audit knows."""
    config, run = small.config(tmp_path / "c.yaml", **CHANGES), tmp_path / "run"
    assert llm_fed("run", config, "rounds=1", "--out", run).code == 0
    again = llm_fed("run", config, "rounds=2", "--out", run)
    assert again.code == 0 and "another environment" not in again.err
    said = llm_fed("run", config, "engine.capture=on", "--out", run)
    assert said.code == 0 and "another environment (captured False -> True)" in said.err
    assert "last bits" in said.err and len(passes(run)) == 1
    audit = llm_fed("audit", run)
    assert "was continued in another environment" in audit.out + audit.err


def test_methods_that_cannot_be_captured_say_so_and_train(small, tmp_path, llm_fed, caplog):
    config = small.config(tmp_path / "c.yaml", **CHANGES)
    words = ["rounds=1", "privacy.unit=example", "privacy.clip=1.0", "privacy.noise=0.5", "engine.capture=on"]
    said = llm_fed("run", config, *words, "--out", tmp_path / "run")
    assert said.code == 0 and passes(tmp_path / "run")[0]["replayed"] == 0
    whys = [line.get("why") for line in read_records(tmp_path / "run/timing.jsonl") if "round" in line]
    assert whys == ["gradients of single examples are asked for"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("training passes are not captured: gradients of single examples are asked for") == 1


@pytest.mark.parametrize("text", ["on", "off", "auto"])
def test_on_and_off_are_words_in_a_file_too(text, tmp_path):
    """YAML reads them as true and false. A saved configuration is read back, too."""
    path = tmp_path / "c.yaml"
    path.write_text(f"engine: {{capture: {text}}}\n")
    found = configfile.load(path)
    assert found.engine.capture == configfile.load({}, [f"engine.capture={text}"]).engine.capture == text
    path.write_text(yaml.safe_dump(configfile.as_dict(found)))
    assert configfile.load(path) == found


def test_a_plan_says_what_is_forced_and_what_is_not_on():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert "captured as CUDA graphs" in in_words(Captures(), gpu, adapters=True)
    assert "gains nothing on cpu" in in_words(Captures(), cpu, adapters=True)
    assert "whole models" in in_words(Captures(), cpu, adapters=False)
    assert not in_words(None, gpu, adapters=True) and not in_words(Captures(forced=False), gpu, adapters=False)
