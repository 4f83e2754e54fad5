"""The scripts for pictures of vision runs - clients, weights, targets, representations, BatchNorm statistics - and
cluster lines in a report: on tiny runs, with their numbers by hand."""

import copy
import csv
import json
from pathlib import Path

import pytest
import tiny_images
import torch
import without
import yaml
from matplotlib.figure import Figure

from llm_fed import tasks
from llm_fed.eval.plots import clusters
from llm_fed.eval.report import write_report
from llm_fed.experiment import finish
from llm_fed.experiment import run as experiment
from llm_fed.export.load import load_image_model
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


# Weights


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
    assert len(maps) == 2  # the script's, and the report's
    for axes in maps:
        assert [name.get_text() for name in axes.get_yticklabels()] == CLIENTS
        assert [line.get_ydata()[0] for line in axes.lines] == [1.5]
        assert axes.images[0].get_array().tolist() == shown["values"]
    (run / "report.html").unlink()


def test_only_ids_that_name_a_cluster_do():
    assert clusters(CLIENTS) == ["cluster0", "cluster0", "cluster1"]
    assert clusters(["client0", "client1"]) is None and clusters(["snli-0", "snli-1", "art-0"]) is None


# Targets


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
