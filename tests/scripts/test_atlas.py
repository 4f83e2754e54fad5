"""Merging coefficients in reports, and the scripts of the Feddle paper's figures, on tiny runs."""

import json
from pathlib import Path

import pytest
import tiny_images
import yaml

from llm_fed.eval.report import write_report
from llm_fed.experiment import run as experiment
from llm_fed.settings import configfile

TREE = {
    "rounds": 3,
    "participation": 0.5,
    "norm_bound": None,
    "base": {"name": "cnn", "dtype": "float32"},
    "adapter": None,
    "method": {"name": "feddle", "atlas_size": 4, "search_lr": 0.05},
    "local": {"steps": None, "epochs": 1, "batch_size": 8, "lr": 0.01, "lr_end": 0.01, "optimizer": "adam"},
    "delay": {"sigma": 1},
    "eval": {"every": 1, "during": "test"},
    "checkpoint": {"keep_rounds": [1, 2, 3]},
    "device": "cpu",
}


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A federation of six clients whose server has pictures of another domain."""
    folder = tmp_path_factory.mktemp("atlas")
    data = tiny_images.npz(folder / "own.npz", train=48, test=20)
    other = tiny_images.npz(folder / "other.npz", train=24, seed=5)
    task = {
        "name": "images", "path": str(data), "validation": 0.0,
        "partition": {"kind": "dirichlet", "clients": 6, "alpha": 10.0},
        "server": {"name": "images", "path": str(other), "examples": 16, "test": True},
    }  # fmt: skip
    (folder / "tiny.yaml").write_text(yaml.safe_dump({**TREE, "task": task}))
    return folder / "tiny.yaml"


@pytest.fixture(scope="module")
def run(config) -> Path:
    """Its finished run."""
    experiment.train(configfile.load(config), config.parent / "run")
    return config.parent / "run"


def test_the_report_shows_coefficients_and_the_test_scores_of_training(run):
    html = (run / "report.html").read_text()
    assert "Merging coefficients by round" in html and "Score by round" in html and "Finished: 3 of 3 rounds" in html


def test_a_run_that_is_tested_during_training_is_not_finished_by_that(run, tmp_path):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    before = next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "score")
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    (tmp_path / "metrics.jsonl").write_text("".join(lines[: before + 1]))
    html = write_report(tmp_path).read_text()
    assert "Not finished: 1 of 3 rounds, no final score yet." in html and ": not the final score" in html
