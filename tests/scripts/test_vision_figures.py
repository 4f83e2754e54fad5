"""The scripts for pictures of vision runs - clients, weights, targets, representations, BatchNorm statistics - and
cluster lines in a report: on tiny runs, with their numbers by hand."""

from __future__ import annotations

import copy
import csv
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_images
import torch
import without
import yaml
from matplotlib.figure import Figure
from safetensors.torch import load_file

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.eval.plots import clusters
from llm_fed.eval.report import write_report
from llm_fed.experiment import finish
from llm_fed.experiment import run as experiment
from llm_fed.export.load import load_image_model
from llm_fed.models.joined import Answer
from llm_fed.runs.records import read_records
from llm_fed.settings import configfile

pytestmark = pytest.mark.slow
CLIENTS = ["cluster0-client0", "cluster0-client1", "cluster1-client2"]
RUNS = {
    "fedavg": {"base": {"name": "resnet-9"}},
    "standalone": {},
    "fedproto": {},
    "fedmoe": {"base": {"name": "cnn", "clients": ["cnn", "resnet-9"]}},
    "fedem": {"method": {"name": "fedem", "num_models": 2}},
    "fedmerge": {"method": {"name": "fedmerge", "num_models": 3, "weight_step": "normalized"}},
}


@pytest.fixture(scope="module", autouse=True)
def quick_reports():
    """Here pictures of reports are drawn, as one test looks at them."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """By method the folder of a finished run of three clients in two clusters, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("figures")
    data = tiny_images.npz(folder / "data.npz")

    def run(method: str) -> Path:
        if not (folder / method).exists():
            changes = {"method": {"name": method}, **RUNS[method]}
            task = {"partition": {"kind": "cluster", "clients": None, "sizes": [2, 1]}}
            tree = tiny_images.tree(data, rounds=2, task=task, eval={"select": "last"}, **changes)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(finish, "write_report", lambda folder: None)  # its pictures take most of the time
                experiment.train(configfile.from_dict(tree), folder / method)
        return folder / method

    return run


@pytest.fixture
def figures(monkeypatch):
    """The figures that were to be written, in order; each is one pixel. Tests without it write theirs."""
    written: list[Figure] = []

    def watched(figure, path, **settings):
        written.append(figure)
        path.write_bytes(without.PIXEL) if isinstance(path, Path) else path.write(without.PIXEL)

    monkeypatch.setattr(Figure, "savefig", watched)
    return written


@pytest.fixture
def refused(analysis, capsys):
    def call(part: str, *words: object) -> None:
        with pytest.raises(SystemExit, match="2"):
            analysis(*words)
        assert part in capsys.readouterr().err

    return call


def rows_of(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def exported(run: Path):
    """Each client's test pictures, and the model that was exported for it."""
    config = configfile.load(run / "config.yaml")
    for id, client in tasks.load(config.task, config.seed).clients.items():
        yield id, client.test, load_image_model(run / "adapters" / id)


def pixels(pictures) -> torch.Tensor:
    return torch.stack([picture.pixels for picture in pictures])


# Clients


def scored(finished, folder: Path, name: str, scores: list[float], **changes: object) -> Path:
    """A finished run as far as its scores go, with these of its three clients and other settings."""
    run = folder / name
    for client in CLIENTS:
        (run / "adapters" / client).mkdir(parents=True)
    config = yaml.safe_load((finished("standalone") / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**config, **changes}))
    clients = dict(zip(CLIENTS, scores, strict=True))
    mean = sum(scores) / len(scores)
    found = {"metric": "accuracy", "clients": clients, "mean": mean, "std": 0.0, "worst_half": mean}
    (run / "summary.json").write_text(json.dumps({"round": 2, "rounds": 2, "method": "standalone", "scores": found}))
    return run


def test_scores_of_clients_are_set_against_each_other(finished, tmp_path, analysis, figures):
    """80, 50, 20 against 60, 50, 40: differences 20, 0, -20; means 50; standard deviations sqrt(600) = 24.49 and
    sqrt(200 / 3) = 8.16; worst halves, of two clients each, 35 and 45."""
    one = scored(finished, tmp_path, "one", [80.0, 50.0, 20.0])
    other = scored(finished, tmp_path, "other", [60.0, 50.0, 40.0])
    module = analysis("clients", one, other)
    assert rows_of(one / "analysis" / "clients.csv")[0] == {"client": CLIENTS[0], "one": "80", "other": "60"}
    upper, lower = figures[0].axes
    assert [list(line.get_ydata()) for line in upper.lines] == [[20, 50, 80], [50, 50], [40, 50, 60], [50, 50]]
    assert [bar.get_height() for bar in lower.patches] == [20.0, 0.0, -20.0]
    assert lower.get_title() == "one minus other: +0.0 on average, above zero for 33% of the clients"
    cells = [list(column.cells) for column in module.table(module.scores({"one": one, "other": other})).columns]
    assert list(zip(*cells, strict=True)) == [
        ("one", "50.00", "24.49", "35.00", "80.00", ""),
        ("other", "50.00", "8.16", "45.00", "60.00", "1, 1, 1"),
    ]


def test_one_run_alone_and_many_clients_are_drawn(finished, analysis, figures, monkeypatch):
    monkeypatch.setattr(analysis("clients"), "MAX_LABELS", 2)
    analysis("clients", finished("standalone"))
    analysis("clients", finished("standalone"), finished("fedproto"))
    assert len(figures[0].axes) == 1 and figures[1].axes[1].get_xlabel() == "client"


def test_only_runs_on_the_same_data_are_compared(finished, tmp_path, refused):
    one, other = (scored(finished, tmp_path, f"seed {seed}", [1, 2, 3], seed=seed) for seed in (0, 1))
    refused("differ in seed, task or clients", "clients", one, other)
    refused("a run is given twice", "clients", one, one)
    (one / "summary.json").write_text('{"round": 2, "method": "standalone", "scores": {"kind": "score"}}')
    refused("has no test scores", "clients", one)


# Weights


def test_gates_are_averaged_by_client_and_class(finished, analysis, figures):
    """As the exported models' gates say of each test picture, one by one."""
    run = finished("fedmoe")
    analysis("weights", run)
    rows = {(row["client"], row["class"]): row for row in rows_of(run / "analysis" / "gates.csv")}
    shown = figures[0].axes[1].images[0].get_array().filled(np.nan)
    for number, (id, pictures, model) in enumerate(exported(run)):
        gates = [model.module(model._base.prepare(picture.pixels[None])).gate[0].tolist() for picture in pictures]
        for label in ["", "0", "1", "2", "3"]:
            chosen = [gate for picture, gate in zip(pictures, gates, strict=True) if label in ("", picture.group)]
            if not chosen:
                assert (id, label) not in rows and np.isnan(shown[number, int(label)])
                continue
            row, (own, small) = rows[id, label], np.array(chosen).T
            found = [float(row[name]) for name in ("pictures", "own", "own std", "small", "small std")]
            assert found == pytest.approx([len(chosen), own.mean(), own.std(), small.mean(), small.std()], abs=1e-5)
            if label:
                assert shown[number, int(label)] == pytest.approx(own.mean(), abs=1e-6)
    assert np.isnan(shown).tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0]]  # the clusters' classes
    assert [line.get_ydata()[0] for line in figures[0].axes[1].lines] == [1.5]
    dots = figures[0].axes[0].lines[1].get_xdata()
    assert dots == pytest.approx([float(rows[id, ""]["own"]) for id in CLIENTS], abs=1e-5)


def test_mixture_weights_are_those_of_the_exported_models(finished, analysis, figures):
    run = finished("fedem")
    analysis("weights", run)
    rows = rows_of(run / "analysis" / "weights.csv")
    assert [row["client"] for row in rows] == CLIENTS
    for row in rows:
        weights = load_file(run / "adapters" / row["client"] / "model.safetensors")["weights"].tolist()
        assert [float(row["expert0"]), float(row["expert1"])] == pytest.approx(weights, abs=1e-5)
        assert weights != [0.5, 0.5]
    assert figures[0].axes[0].get_xlabel() == "model"


def test_merging_weights_are_drawn_with_the_lines_of_clusters(finished, analysis, figures):
    """Two clients, a line, one client: by the script and in the report."""
    run = finished("fedmerge")
    analysis("weights", run)
    write_report(run)
    tested = json.loads((run / "summary.json").read_text())["round"]
    lines = [line for line in read_records(run / "metrics.jsonl") if line["kind"] == "server"]
    (shown,) = [line["weights"] for line in lines if line["round"] == tested]
    rows = rows_of(run / "analysis" / "weights.csv")
    assert [[float(row[str(j)]) for j in range(3)] for row in rows] == shown["values"]
    maps = [figure.axes[0] for figure in figures if figure.axes[0].images]
    assert len(maps) == 3  # the report has one for a light and one for a dark page
    for axes in maps:
        assert [name.get_text() for name in axes.get_yticklabels()] == CLIENTS
        assert [line.get_ydata()[0] for line in axes.lines] == [1.5]
        assert axes.images[0].get_array().tolist() == shown["values"]
    (run / "report.html").unlink()


def test_merging_weights_of_several_rounds_are_one_picture(finished, analysis, figures, refused):
    run = finished("fedmerge")
    analysis("weights", run, "--rounds", "2,1")
    lines = {line["round"]: line["weights"] for line in read_records(run / "metrics.jsonl") if line["kind"] == "server"}
    rows = rows_of(run / "analysis" / "weights_by_round.csv")
    assert [(int(row["round"]), row["client"]) for row in rows] == [(k, name) for k in (1, 2) for name in CLIENTS]
    assert [[float(row[str(j)]) for j in range(3)] for row in rows] == [*lines[1]["values"], *lines[2]["values"]]
    maps = [axes for axes in figures[-1].axes if axes.images]
    assert [axes.get_title() for axes in maps] == ["after round 1", "after round 2"]
    assert [axes.images[0].get_array().tolist() for axes in maps] == [lines[1]["values"], lines[2]["values"]]
    refused("has no merging weights after this round", "weights", run, "--rounds", "99")


def test_only_ids_that_name_a_cluster_do():
    assert clusters(CLIENTS) == ["cluster0", "cluster0", "cluster1"]
    assert clusters(["client0", "client1"]) is None and clusters(["snli-0", "snli-1", "art-0"]) is None


def test_a_run_without_weights_is_refused(finished, tmp_path, refused):
    refused("weighs nothing", "weights", finished("standalone"))
    refused("is not a run folder", "weights", tmp_path)


# Targets


def rescored(run: Path, folder: Path, during: str, *means: float, final: float) -> Path:
    """A copy of a run with other mean scores of its rounds and at its end."""
    shutil.copytree(run, folder)
    lines = [line for line in read_records(run / "metrics.jsonl") if line["kind"] != "score"]
    known = {"kind": "score", "metric": "accuracy", "clients": {CLIENTS[0]: 50.0}, "worst_half": 50.0}
    scores = [{**known, "round": n, "split": during, "mean": mean} for n, mean in enumerate(means, start=1)]
    lines += [*scores, {**known, "round": 2, "split": "test", "mean": final}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["eval"]["during"] = during
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


FORWARD = [16 * 32**2 * 27, 32 * 16**2 * 144, 32 * 8**2 * 288, 512 * 64, 64 * 4]  # the CNN's multiplications, by layer
TRAINED = 2 * (3 * sum(FORWARD) - FORWARD[0])  # the gradients of weights and, but for the first layer, of inputs


def test_costs_until_a_target(finished, tmp_path, analysis, figures, capsys):
    """One epoch of each round is forward and backward of every training picture; prototypes are another pass."""
    one = rescored(finished("standalone"), tmp_path / "one", "validation", 50.0, 40.0, final=0.0)
    other = rescored(finished("fedproto"), tmp_path / "other", "validation", 30.0, 55.0, final=99.0)
    analysis("target", "--target", 50, one, other)
    lines = [line for line in read_records(other / "metrics.jsonl") if line["kind"] == "client"]
    up, down = (sum(line[key] for line in lines) for key in ("bytes_up", "bytes_down"))
    images = sum(line["examples"] for line in lines) // 2
    costs = [images * TRAINED, 2 * images * (TRAINED + 2 * sum(FORWARD))]
    first, second = rows_of(one / "analysis" / "target.csv")
    assert [first[key] for key in ("run", "reached", "round", "flops")] == ["standalone", "True", "1", str(costs[0])]
    assert (second["round"], float(second["score"]), int(second["flops"])) == ("2", 55.0, costs[1])
    assert (int(second["bytes_up"]), int(second["bytes_down"])) == (up, down) and up > 0
    bars = [[bar.get_width() for bar in axes.patches] for axes in figures[0].axes]
    assert (bars[0], bars[1][1], bars[2]) == ([1, 2], up + down, costs)
    assert "55.00" in capsys.readouterr().out


def test_both_models_of_a_client_count(finished, analysis):
    """Twice the CNN, but the small one has no head, and the own one's also reads its own features alone, from which no
    gradient comes. The gate's layers have gradients of weights and inputs: a learned normalisation is before them. The
    run stays as it is."""
    run = finished("fedmoe")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    each = analysis("target").flops_of_a_round(run, [CLIENTS[0]])
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    lines = [line for line in read_records(run / "metrics.jsonl") if line.get("client") == CLIENTS[0]]
    gate, head = 3 * 2 * (3072 * 32 + 32 * 2), 2 * FORWARD[-1]
    assert each == {CLIENTS[0]: lines[0]["examples"] * (2 * TRAINED - 3 * head + head + gate)}


def test_a_final_score_is_none_of_a_round(finished, tmp_path, analysis, figures, capsys):
    """Fine-tuning after the last round may reach what no round did."""
    run = rescored(finished("standalone"), tmp_path / "run", "test", 30.0, 55.0, final=99.0)
    analysis("target", "--target", 60, run)
    (row,) = rows_of(run / "analysis" / "target.csv")
    assert list(row.values()) == ["standalone", "False", "2", "55", "", "", ""]
    assert "not reached: the best" in capsys.readouterr().out
    assert [text.get_text() for text in figures[0].axes[2].texts] == ["not reached"]


def test_runs_that_say_too_little_are_refused(finished, tmp_path, refused):
    run = rescored(finished("standalone"), tmp_path / "run", "validation", final=99.0)
    refused("has no scores of its rounds", "target", "--target", 1, run)
    other = rescored(finished("standalone"), tmp_path / "other", "validation", 30.0, final=99.0)
    shutil.rmtree(other / "checkpoints")
    refused("has no checkpoint", "target", "--target", 1, other)
    assert not (other / "checkpoints").exists()


# Representations


def test_features_are_what_the_head_reads(finished, analysis):
    """Logits of the exported model are its head's of these features, mixed by the gate before."""
    run = finished("fedmoe")
    found, labels = analysis("finished").tested(run, limit=3)
    features = torch.from_numpy(analysis("representations").features(found)).split(3)
    for part, (id, pictures, model) in zip(features, exported(run), strict=True):
        head = model.module.get_submodule(f"own.{model.module.heads['own']}")
        torch.testing.assert_close(head(part), model(pixels(pictures[:3])), rtol=0, atol=1e-5)
        assert torch.equal(pixels(found[id].pictures), pixels(pictures[:3]))
    assert labels == ("0", "1", "2", "3")


def test_models_of_other_widths_do_not_go_together(analysis):
    features = [torch.zeros(2, width) for width in (3, 4)]
    tested = analysis("finished").Scored
    found = {str(own.shape[1]): tested((), Answer(own, own), None, ()) for own in features}
    with pytest.raises(UserError, match=r"have \[3, 4\] features"):
        analysis("representations").features(found)


def test_representations_are_embedded(finished, analysis, figures):
    pytest.importorskip("sklearn", reason="t-SNE needs scikit-learn: pip install -e '.[analysis]'")
    run = finished("fedmoe")
    analysis("representations", run, "--examples", 4)
    rows = rows_of(run / "analysis" / "representations.csv")
    shown = [(id, str(picture.label)) for id, pictures, _ in exported(run) for picture in pictures[:4]]
    assert [(row["client"], row["class"]) for row in rows] == shown
    drawn = np.concatenate([points.get_offsets() for points in figures[0].axes[0].collections])
    places = [[float(row["x"]), float(row["y"])] for row in sorted(rows, key=lambda row: row["class"])]
    np.testing.assert_allclose(drawn, places, rtol=1e-4)


def test_far_groups_stay_apart(analysis):
    """The nearest neighbour of every point is of its own group."""
    pytest.importorskip("sklearn", reason="t-SNE needs scikit-learn: pip install -e '.[analysis]'")
    rng = np.random.default_rng(0)
    groups = np.repeat([0, 1, 2], 15)
    points = rng.normal(size=(45, 20)).astype(np.float32) + 30 * groups[:, None]
    places = analysis("representations").embed(points, seed=0)
    distances = np.linalg.norm(places[:, None] - places[None], axis=-1) + np.diag(np.full(45, np.inf))
    assert (groups[distances.argmin(1)] == groups).all()


def test_without_scikit_learn_it_is_named(finished, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    refused("pip install -e '.[analysis]'", "representations", finished("fedmoe"))


# Statistics


def statistics_of(model, batches) -> dict[str, torch.Tensor]:
    """Running means and variances of BatchNorm by torch's momentum: the mean over the batches, each seen alone."""
    seen = []
    for batch in batches:
        own = copy.deepcopy(model).train()
        for layer in own.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.momentum = 1.0  # what was before is forgotten
        with torch.no_grad():
            own(pixels(batch))
        seen.append({name: buffer for name, buffer in own.module.named_buffers() if buffer.is_floating_point()})
    return {name: torch.stack([statistics[name] for statistics in seen]).mean(0) for name in seen[0]}


@pytest.mark.parametrize("batch", [256, 3])
def test_statistics_are_those_of_the_pictures(finished, analysis, monkeypatch, batch):
    script = analysis("batchnorm")
    monkeypatch.setattr(script, "BATCH", batch)
    built, base, states = analysis("finished").whole(finished("fedavg"))
    for id, _, model in exported(finished("fedavg")):
        pictures = built.clients[id].train
        count = max(1, round(len(pictures) / batch))
        assert (count > 1) == (batch == 3)
        anew = script.recomputed(base, built.clients[id].structure, states[id], pictures)
        expected = statistics_of(model, [pictures[nth::count] for nth in range(count)])
        assert torch.equal(anew.row, states[id].row) and anew.extras.keys() == expected.keys()
        for name, values in expected.items():
            torch.testing.assert_close(anew.extras[name], values)
            assert not torch.equal(values, states[id].extras[name])


def test_clients_are_scored_with_each_statistics(finished, analysis, capsys):
    run = finished("fedavg")
    script = analysis("batchnorm", run)
    assert "as it is" in capsys.readouterr().out
    built, base, states = analysis("finished").whole(run)
    everybody = [picture for site in built.clients.values() for picture in site.train]
    rows = {row["client"]: row for row in rows_of(run / "analysis" / "batchnorm.csv")}
    assert list(rows) == CLIENTS
    for id, test, model in exported(run):
        site, labels = built.clients[id], torch.tensor([picture.label for picture in test])
        states_by_column = {
            "as it is": states[id],
            "of all clients": script.recomputed(base, site.structure, states[id], everybody),
            "of its own": script.recomputed(base, site.structure, states[id], site.train),
        }
        for column, state in states_by_column.items():
            model.module.load_state_dict(state.extras, strict=False)
            with torch.no_grad():
                right = model(pixels(test)).argmax(1) == labels
            assert float(rows[id][column]) == pytest.approx(100 * float(right.float().mean()), abs=1e-3)


def test_models_of_a_kept_round_are_scored(finished, analysis, refused, capsys):
    """After the last round they are the exported ones, as nothing is trained afterwards."""
    run = finished("fedavg")
    script = analysis("batchnorm", run)
    analysis("batchnorm", run, "--round", 2)
    assert rows_of(run / "analysis" / "batchnorm-2.csv") == rows_of(run / "analysis" / "batchnorm.csv")
    built, _, states = analysis("finished").whole(run)
    first = script.after(built, run, 1)
    assert not any(torch.equal(first[id].row, states[id].row) for id in CLIENTS)
    refused("give a round of checkpoint.keep_rounds", "batchnorm", run, "--round", 9)


def test_models_without_batchnorm_are_refused(finished, refused):
    refused("have no BatchNorm", "batchnorm", finished("standalone"))


def test_clients_without_test_pictures_are_refused(finished, analysis, refused, monkeypatch):
    run = finished("fedavg")
    built, base, states = analysis("finished").whole(run)
    for site in built.clients.values():
        site.data = replace(site.data, queries={})
    monkeypatch.setattr(analysis("batchnorm"), "whole", lambda run: (built, base, states))
    refused("no client has test pictures", "batchnorm", run)
