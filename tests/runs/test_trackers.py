"""Experiment trackers: the same names in each, rounds and steps, one entry for a continued run, and what is kept."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llm_fed
from llm_fed.basics.errors import UserError


class Pretended:
    """A tracker that remembers what it was told, in the place of Accelerate's."""

    def __init__(self, name: str):
        self.name, self.tracker, self.logged, self.config, self.finished = name, self, [], {}, 0
        self.info = SimpleNamespace(run_id="one")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.logged += [(name, step, value) for name, value in values.items()]

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def pretended(monkeypatch) -> list[Pretended]:
    """All trackers that were begun."""
    begun: list[Pretended] = []

    class Accelerator:
        def __init__(self, log_with: list[str], project_dir: Path):
            self.trackers = [Pretended(name) for name in log_with]

        def init_trackers(self, project: str, init_kwargs: dict[str, Any]) -> None:
            begun.extend(self.trackers)

    monkeypatch.setattr("llm_fed.runs.trackers.Accelerator", Accelerator)
    monkeypatch.setattr("llm_fed.bench.build.check_trackers", lambda track: None)
    return begun


class Fails:
    def __init__(self, round: int):
        self.round = round

    def on_round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.round:
            raise ZeroDivisionError


def test_steps_and_rounds_go_on_in_a_continued_run(small, tmp_path, pretended):
    tree = small.tree(rounds=3, track={"with": ["aim"]})
    with pytest.raises(ZeroDivisionError):
        llm_fed.run(tree, out=tmp_path / "run", callbacks=[Fails(2)])
    llm_fed.run(tree, out=tmp_path / "run")
    first, second = pretended
    assert [step for name, step, _ in first.logged if name == "step/loss"] == [1, 2, 3, 4]
    assert [step for name, step, _ in second.logged if name == "step/loss"] == [5, 6]
    tested = json.loads((tmp_path / "run/summary.json").read_text())["round"]
    scores = [(name, step) for name, step, _ in second.logged if name in ("loss", "validation/mean", "test/mean")]
    assert scores[:2] == [("loss", 3), ("validation/mean", 3)] and scores[-1] == ("test/mean", tested)
    names = {name for name, _, _ in first.logged}
    assert {"lr", "bytes_up", "validation/clients/ada", "validation/client_losses/ada"} <= names
    assert first.finished == second.finished == 1 and first.config["local.steps"] == 2


def test_names_are_such_as_every_tracker_takes(small, tmp_path, pretended):
    data = {"süd (1)": [("w20 w21", "w4 w5"), ("w21 w22", "w4 w5")] * 3}
    tree = small.tree(rounds=1, task={"validation": 0.4}, track={"with": ["aim"]})
    del tree["task"]["path"]
    llm_fed.run(tree, data=data, out=tmp_path / "run")
    assert {name for name, _, _ in pretended[0].logged if "clients" in name} >= {"test/clients/süd _1_"}


def test_links_within_the_folder_of_trackers_are_no_obstacle(small, tmp_path, pretended):
    """Weights & Biases leaves some; one that leads elsewhere is refused as before."""
    tree = small.tree(rounds=2, track={"with": ["aim"]})
    with pytest.raises(ZeroDivisionError):
        llm_fed.run(tree, out=tmp_path / "run", callbacks=[Fails(1)])
    trackers = tmp_path / "run/trackers"
    (trackers / "log").touch()
    (trackers / "latest").symlink_to("log")
    assert llm_fed.run(tree, out=tmp_path / "run").round
    (trackers / "away").symlink_to(tmp_path)
    with pytest.raises(UserError, match="away is a symbolic link"):
        llm_fed.run(tree, "rounds=3", out=tmp_path / "run")


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "wandb"])
def test_the_real_ones_write_into_the_run_folder_alone(small, tmp_path, monkeypatch, name):
    pytest.importorskip(name)
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path / "here")
    tree = small.tree(rounds=2, track={"with": [name]})
    with pytest.raises(ZeroDivisionError):
        llm_fed.run(tree, out="run", callbacks=[Fails(1)])
    llm_fed.run(tree, out="run")
    assert [path.name for path in Path.cwd().iterdir()] == ["run"]
    assert not [path for path in (tmp_path / "home").rglob("*") if name in str(path.relative_to(tmp_path))]
    assert any((Path("run/trackers")).iterdir())
