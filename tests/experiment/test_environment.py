"""What a run writes down of the place where it computes, and what it says when that has changed."""

import io
import json

import pytest
import torch
from rich.console import Console

from llm_fed.basics import checksum
from llm_fed.experiment import environment
from llm_fed.experiment import run as experiment
from llm_fed.runs import folder as run_folder
from llm_fed.runs.records import read_records, timed_rounds
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import from_dict


def go(small, folder, rounds: int) -> str:
    said = io.StringIO()
    reporter = Reporter(Console(file=said, soft_wrap=True))
    experiment.train(from_dict(small.tree(rounds=rounds)), folder, reporter=reporter)
    return said.getvalue()


def test_what_is_recorded_and_what_has_changed(small, tmp_path):
    go(small, tmp_path / "run", 1)
    file = tmp_path / "run/environment.json"
    found = checksum.checked(json.loads(file.read_text()))
    assert found["hardware"] and found["device"] == "cpu"
    assert {"llm_fed", "torch", "transformers", "peft", "python", "machine", "dtype"} <= found.keys()
    assert "another environment" not in go(small, tmp_path / "run", 2)
    file.write_text(json.dumps(found | {"hardware": "an abacus"}))
    for rounds in (3, 4):
        assert f"another environment (hardware an abacus -> {found['hardware']})" in go(small, tmp_path / "run", rounds)
    assert checksum.checked(json.loads(file.read_text())) == found | {"hardware": "an abacus", "continued": [found]}


def test_the_time_of_day_is_where_equal_runs_may_differ(small, tmp_path):
    go(small, tmp_path / "run", 1)
    (line,) = timed_rounds(tmp_path / "run")
    assert line["ended"].startswith("20") and line["ended"].endswith("+00:00")
    for name in ("metrics.jsonl", "environment.json", "summary.json"):
        assert line["ended"][:10] not in (tmp_path / "run" / name).read_text()


def test_a_base_that_no_gpu_has_tried_is_recorded_as_it_is_computed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for tried in (False, True):
        now = environment.environment(torch.device("cuda"), "bfloat16", 1, "auto", tried=tried)
        assert [bool(now[key]) for key in ("captured", "padding_free", "fused")] == [tried] * 3
        assert now["hardware"] == "a card"


def test_the_time_of_a_run_is_all_of_it(small, tmp_path, monkeypatch):
    """What comes before the rounds and after them counts, and a continued run adds its own."""
    now = [0.0]
    monkeypatch.setattr(run_folder.time, "perf_counter", lambda: now.__setitem__(0, now[0] + 1.0) or now[0])
    go(small, tmp_path / "run", 1)
    began, round, ended = read_records(tmp_path / "run/timing.jsonl")
    assert [next(iter(line["parts"])) for line in (began, ended)] == ["before the rounds", "after the rounds"]
    assert sum(line["seconds"] for line in (began, round, ended)) == pytest.approx(now[0] - 1, abs=4)
    go(small, tmp_path / "run", 2)
    assert [line["round"] for line in timed_rounds(tmp_path / "run")] == [1, 2]
    assert len(read_records(tmp_path / "run/timing.jsonl")) == 6
