"""Merging coefficients in reports, and the scripts of the Feddle paper's figures, on tiny runs."""

from __future__ import annotations

import csv
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import tiny_images
import torch
import yaml

from llm_fed.bench import build
from llm_fed.eval import merges
from llm_fed.eval.plots import plot_bands
from llm_fed.eval.report import write_report
from llm_fed.experiment import run as experiment
from llm_fed.federation.progress import restore
from llm_fed.runs.checkpoint import Checkpoints
from llm_fed.runs.tracking import Reporter
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


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_spreads_are_the_quantiles_and_the_negative_share():
    """Of -1, 0, 1, 2, 3: quartiles 0, 1 and 2; one of five is negative. Other lines are passed over."""
    lines = [
        {"round": 1, "coefficients": []},
        {"round": 2, "weights": 0},
        {"round": 3, "coefficients": [3, 0, -1, 2, 1]},
    ]
    assert merges.spreads(lines) == [merges.CoefficientQuantiles(3, 5, (-1.0, 0.0, 1.0, 2.0, 3.0), 0.2)]


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


def test_coefficients_as_numbers(run, analysis):
    analysis("coefficients", run)
    rows = table(run / "analysis" / "coefficients.csv")
    assert [int(row["round"]) for row in rows] and (run / "analysis" / "coefficients.png").stat().st_size > 1000
    for row in rows:
        bounds = [float(row[name]) for name in ("minimum", "lower_quartile", "median", "upper_quartile", "maximum")]
        assert bounds == sorted(bounds) and (float(row["negative"]) > 0) == (bounds[0] < 0)


def test_a_run_without_a_search_is_refused(tmp_path, analysis, capsys):
    with pytest.raises(SystemExit, match="2"):
        analysis("coefficients", tmp_path)
    assert "holds no merging coefficients" in capsys.readouterr().err


def test_directions_take_the_step_back(run, analysis):
    """The model before a round's search is that of the round before: no running statistics here."""
    before_search = analysis("searches").before_search
    built = build.prepare(configfile.load(run / "config.yaml"), Reporter())
    saved = Checkpoints(run / "checkpoints")
    states = [restore(saved.load(round), built.clients, built.server).state for round in (1, 2, 3)]
    for earlier, later in pairwise(states):
        if later["search"]:
            torch.testing.assert_close(before_search(built, later)[0].row, earlier["model"].row, rtol=0, atol=1e-6)
    assert any(not torch.equal(a["model"].row, b["model"].row) for a, b in pairwise(states))


def test_directions_are_derivatives_by_the_coefficients(run, analysis):
    """Of the loss on the server's test pictures, by finite differences along each anchor."""
    module = analysis("directions", run)
    rows = table(run / "analysis" / "directions.csv")
    assert all(-1 <= float(row[name]) <= 1 for row in rows for name in ("fallback", "zero")) and rows
    assert (run / "analysis" / "directions.png").exists()
    built = build.prepare(configfile.load(run / "config.yaml"), Reporter())
    state = restore(Checkpoints(run / "checkpoints").load(3), built.clients, built.server).state
    omega, anchors = module.before_search(built, state)
    test = built.server.data.queries["test"]

    async def slopes():
        at = [omega.like(omega.row + sign * 0.02 * anchor) for anchor in anchors for sign in (1, -1)]
        losses = await built.server.losses_of(at, test)
        return await module.slope(built.server, omega, anchors, test, None), losses

    (outcome,) = built.runtime.run({"server": slopes()}).values()
    slope, losses = outcome
    numeric = torch.tensor([(up - down) / 0.04 for up, down in zip(losses[::2], losses[1::2], strict=True)])
    torch.testing.assert_close(slope.float(), numeric.float(), rtol=0.02, atol=2e-3)


def test_directions_want_a_run_that_searched(config, analysis, capsys):
    run = config.parent / "no search"
    experiment.train(configfile.load(config, ["method=fedavg", "rounds=1", "checkpoint.keep_rounds=[1]"]), run)
    with pytest.raises(SystemExit, match="2"):
        analysis("directions", run)
    assert "had not searched by round 1; give a run of Feddle" in capsys.readouterr().err


def test_updates_against_the_mean_of_all_clients(config, analysis, tmp_path):
    """Round 1 of three, with everybody counted: the mean by examples, and each client's cosine with it, by hand."""
    words = ["task.server.name=null", "task.server.path=null", "method=fedavg"]
    module = analysis("updates", config, *words, "--alphas", "5", "--rounds", "3", "--every", "2", "--out", tmp_path)
    rows, pairs = table(tmp_path / "cosines.csv"), table(tmp_path / "between.csv")
    assert {row["round"] for row in rows} == {"1", "3"} and [pair["later"] for pair in pairs] == ["3"]
    built = build.prepare(configfile.load(config, [*words, "task.partition.alpha=5.0"]), Reporter())
    deltas = module.trained(built, built.server.initial(), list(built.clients), 1)
    sizes = torch.tensor([float(site.num_examples) for site in built.clients.values()])
    true = (sizes[:, None] * torch.stack([delta.row for delta in deltas.values()])).sum(0) / sizes.sum()
    for row in rows[: len(rows) // 2]:
        delta = deltas[row["client"]].row
        assert float(row["cosine"]) == pytest.approx(float(delta @ true / delta.norm() / true.norm()), abs=1e-4)


def test_a_curve_that_lacks_a_place_does_not_move_the_others(tmp_path):
    curves = {"one": (["0", "1"], [1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), "two": (["0.1"], [3.0], [3.0], [3.0])}
    text = plot_bands(tmp_path / "bands.svg", curves, xlabel="x", ylabel="y", places=["0", "0.1", "1"]).read_text()
    axis = text[text.index("matplotlib.axis_1") : text.index("matplotlib.axis_2")]
    assert re.findall(r"<!-- ([\d.]+) -->", axis) == ["0", "0.1", "1"]


def test_settings_are_drawn_from_a_comparison(tmp_path, analysis, monkeypatch):
    rows = [
        {"words": ["method=feddle", f"method.atlas_size={size}"], "seeds": {"0": {"average": size}, "1": "failed: x"}}
        for size in (20, 5)
    ]
    (tmp_path / "table.json").write_text(json.dumps({"metric": "accuracy", "rows": rows}))
    module, drawn = analysis("settings"), {}
    monkeypatch.setattr(module, "plot_bands", lambda path, curves, **named: drawn.update(named, curves=curves))
    other = tmp_path / "other"
    other.mkdir()
    more = [{"words": ["method.atlas_size=10"], "seeds": {"0": {"average": 1}}}]
    (other / "table.json").write_text(json.dumps({"metric": "accuracy", "rows": more}))
    analysis("settings", "method.atlas_size", tmp_path, other)
    assert drawn["places"] == ["5", "10", "20"] and drawn["curves"]["other"][0] == ["10"]
    monkeypatch.undo()
    analysis("settings", "method.atlas_size", tmp_path)
    found = table(tmp_path / "settings.csv")
    assert [(row["method.atlas_size"], row["seeds"], row["mean"]) for row in found] == [
        ("5", "1", "5"),
        ("20", "1", "20"),
    ]
    assert (tmp_path / "settings.png").exists()
