"""What a run writes down of the place where it computes, and what it says when that has changed."""

from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from llm_fed.basics import checksum
from llm_fed.engine import fit
from llm_fed.engine.calibration import Calibration
from llm_fed.engine.capture import Captures
from llm_fed.engine.engine import Engine
from llm_fed.engine.packing import plan
from llm_fed.engine.padding_free import PaddingFree
from llm_fed.experiment import environment, finish
from llm_fed.experiment import run as experiment
from llm_fed.runs import folder as run_folder
from llm_fed.runs.records import read_records, timed_rounds
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import EngineConfig
from llm_fed.settings.configfile import from_dict


@pytest.fixture(autouse=True)
def no_reports(monkeypatch):
    monkeypatch.setattr(finish, "write_report", lambda folder: None)


def go(small, folder, rounds: int) -> str:
    said = io.StringIO()
    reporter = Reporter(Console(file=said, soft_wrap=True))
    experiment.train(from_dict(small.tree(rounds=rounds)), folder, reporter=reporter)
    return said.getvalue()


def silent() -> Reporter:
    return Reporter(Console(file=io.StringIO()))


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


def test_a_packing_that_was_measured_is_recorded_and_taken_over(small, tmp_path, monkeypatch):
    """As on a GPU. It is measured once, before the first round, and a run that goes on takes what is recorded."""
    packed: list[tuple[int, int]] = []

    def fused(lengths, budget, overhead, grid):
        packed.append((budget, overhead))
        return plan(lengths, budget, overhead, grid)

    monkeypatch.setattr(fit, "plan", fused)
    measured = iter([Calibration(40, 7, (1.0, 0.1), (0.0, 1.0))])
    monkeypatch.setattr(environment, "calibrate", lambda model, reserved, examples: next(measured))
    assert "packing of micro-batches, measured here: at most 40 tokens" in go(small, tmp_path / "run", 1)
    found = checksum.checked(json.loads((tmp_path / "run/environment.json").read_text()))
    assert found["packing"] == {"budget": 40, "overhead": 7, "seconds": [1.0, 0.1], "bytes": [0.0, 1.0]}
    assert set(packed) == {(40, 7)}
    assert "another environment" not in go(small, tmp_path / "run", 2) and set(packed) == {(40, 7)}


@pytest.mark.parametrize("setting", ["capture", "padding_free"])
def test_what_is_captured_or_has_no_padding_is_not_measured(setting, small, tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "calibrate", lambda *given: pytest.fail("it is measured"))
    config = from_dict(small.tree(rounds=1, engine={setting: "on"}))
    experiment.train(config, tmp_path / "run", reporter=silent())
    assert json.loads((tmp_path / "run/environment.json").read_text())[setting.replace("capture", "captured")] is True


@pytest.mark.parametrize("setting", ["capture", "padding_free"])
def test_what_can_be_neither_is_measured(setting, small, tmp_path, monkeypatch):
    """Gradients of single examples, whatever a GPU does of itself."""
    monkeypatch.setattr(environment, "calibrate", lambda *given: Calibration(40, 7, (1e-4, 1e-6), (1e6, 1e3)))
    configure = Engine.configure

    def as_on_a_gpu(engine: Engine, *given: object) -> None:
        configure(engine, *given)
        if setting == "capture":
            engine.captures = Captures()
        else:
            engine.padding_free = PaddingFree(forced=False)

    monkeypatch.setattr(Engine, "configure", as_on_a_gpu)
    private = {"unit": "example", "clip": 1.0, "noise": 1.0}
    experiment.train(from_dict(small.tree(rounds=1, privacy=private)), tmp_path / "run", reporter=silent())
    assert json.loads((tmp_path / "run/environment.json").read_text())["packing"]["overhead"] == 7


def test_a_base_that_no_gpu_has_tried_is_recorded_as_it_is_computed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    for tried in (False, True):
        now = environment.environment(torch.device("cuda"), "bfloat16", 1, EngineConfig(), tried=tried)
        assert [bool(now[key]) for key in environment.WAYS.values()] == [tried] * 3 and now["hardware"] == "a card"


@pytest.mark.parametrize("keyed", [False, True])
def test_a_run_keeps_the_masks_that_it_began_with(keyed, small, tmp_path, monkeypatch):
    """From keys, as on a GPU with engine.capture=on, or drawn, whatever it is continued with. A CPU knows both."""
    asked, real, configure = list[int](), fit.mask_keys, Engine.configure
    monkeypatch.setattr(fit, "mask_keys", lambda *given, **more: asked.append(0) or real(*given, **more))

    def as_if(now: bool):
        def configured(engine, *given):
            configure(engine, *given)
            engine.keyed_masks = now

        monkeypatch.setattr(Engine, "configure", configured)

    def trained(folder, rounds: int) -> str:
        said = io.StringIO()
        config = from_dict(small.tree(rounds=rounds, adapter={"dropout": 0.1}))
        experiment.train(config, folder, reporter=Reporter(Console(file=said, soft_wrap=True)))
        return said.getvalue()

    as_if(keyed)
    trained(tmp_path / "once", 2)
    trained(tmp_path / "run", 1)
    known = json.loads((tmp_path / "run/environment.json").read_text())
    assert known.get("keyed_masks", False) == keyed == bool(asked)
    as_if(not keyed)
    asked.clear()
    assert "another environment" not in trained(tmp_path / "run", 2) and bool(asked) == keyed
    once, run = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("once", "run"))
    assert once == run


def test_on_a_cpu_the_constants_stay(small, tmp_path, monkeypatch):
    packed: set[tuple[int, int]] = set()
    monkeypatch.setattr(fit, "plan", lambda lengths, *how: packed.add(how) or plan(lengths, *how))
    assert "packing" not in go(small, tmp_path / "run", 1)
    assert "packing" not in json.loads((tmp_path / "run/environment.json").read_text())
    assert packed == {(1024, 32, None)}


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
