"""Where a run computes: what it writes down of that place, and pictures on its device (here `meta`, which holds shapes
without values)."""

import io
import json
from typing import Any

import pytest
import tiny_images
import torch
import toy
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode

from llm_fed import kinds, methods, tasks
from llm_fed.basics import checksum
from llm_fed.basics.rng import generator
from llm_fed.bench import sites
from llm_fed.experiment import environment, run
from llm_fed.experiment import run as experiment
from llm_fed.kinds import images
from llm_fed.method.requests import moved
from llm_fed.method.site import Data
from llm_fed.runs import folder as run_folder
from llm_fed.runs.records import read_records, timed_rounds
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import configfile
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks.common import ClientData, TaskData, pixels_of


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


# Pictures on the device


META = torch.device("meta")
PICTURES = tuple(tiny_images.pictures(12, size=16))
TASK = TaskData(
    "images", "accuracy", labels=("a", "b", "c", "d"),
    clients={
        "ann": ClientData("ann", PICTURES[:4], PICTURES[4:5], PICTURES[5:7]),
        "bob": ClientData("bob", PICTURES[7:9]),
    },
    server=ClientData("server", PICTURES[9:]),
)  # fmt: skip
SIZE = 12 * 3 * 16 * 16


def data(config=None, device=META, said=lambda line: None):
    """By party what it is given, and its data with pictures that were made ready for a base on `device`."""
    base = tiny_images.cnn()
    base.model.to(device)
    encoding = base.encoding(config or configfile.from_dict({}), TASK, "labels", said)
    parties = [*TASK.clients.values(), TASK.server]
    return [(given, encoding.data(given.client, given, Data())) for given in parties]


@pytest.fixture
def said():
    return io.StringIO()


@pytest.fixture
def reporter(said):
    return Reporter(Console(file=said, soft_wrap=True))


def splits(given: ClientData, made: Data) -> list[tuple[Any, Any]]:
    queries = [(given.validation, made.queries["validation"]), (given.test, made.queries["test"])]
    return [(given.train, made.train), (given.validation, made.held_out), *queries]


def test_every_picture_is_placed_and_nothing_else_changes():
    lines: list[str] = []
    for given, made in data(said=lines.append):
        for old, new in splits(given, made):
            assert [(p.label, p.group, p.pixels.shape) for p in old] == [
                (p.label, p.group, p.pixels.shape) for p in new
            ]
            assert all(p.pixels.device == META and p.pixels.dtype == torch.uint8 for p in new)
            assert all(p.pixels.device.type == "cpu" for p in old)
    assert not lines


def test_each_picture_keeps_its_own_pixels():
    placed = images.placed(PICTURES, torch.device("cpu"))
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(PICTURES, placed, strict=True))
    assert len({picture.pixels.untyped_storage().data_ptr() for picture in placed}) == 1


@pytest.mark.parametrize(("free", "fits"), [(4 * SIZE, True), (4 * SIZE - 1, False)])
def test_a_quarter_of_free_memory_is_the_limit(free, fits, monkeypatch):
    monkeypatch.setattr(images, "free_memory", lambda device: free)
    lines: list[str] = []
    ((given, made), *_) = data(said=lines.append)
    assert (made.train is given.train) == (not fits)
    expected = "would fill over a quarter of the free memory of meta, so they stay in the host's memory"
    assert any(expected in line for line in lines) == (not fits)


def test_a_cpu_leaves_them_where_they_are():
    assert all(made.train is given.train for given, made in data(device=torch.device("cpu")))


def test_a_run_places_them_where_its_base_is(tmp_path, reporter):
    config = configfile.from_dict(tiny_images.tree(tiny_images.npz(tmp_path / "data.npz"), base={"name": "cnn"}))
    task = tasks.load(config.task, config.seed)
    base = kinds.load(config, task, "meta")
    method = methods.build(config.method)
    clients, _, _ = sites.build(config, task, base, method, "accuracy", reporter, toy.secret(), every=True)
    found = [p for site in clients.values() for p in (*site.train, *site.data.held_out, *site.data.queries["test"])]
    assert {picture.pixels.device for picture in found} == {META}


@pytest.mark.parametrize("flip", [False, True])
def test_augmented_and_made_ready_they_stay_there(flip):
    """The draws are a CPU's, so that a run's pictures are the same on every device."""
    base = tiny_images.cnn()
    base.model.to(META)
    pictures = images.placed(PICTURES, META)
    with FakeTensorMode(allow_non_fake_inputs=True):  # refuses to mix devices, as a GPU does
        found = moved(pixels_of(pictures), generator(0), flip=flip)
        inputs = base.prepare(found)
    assert (found.device, found.dtype, found.shape) == (META, torch.uint8, (12, 3, 16, 16))
    assert (inputs.device, inputs.shape) == (META, (12, 3, 32, 32))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_trains_as_a_cpu_does(tmp_path):
    data = tiny_images.npz(tmp_path / "data.npz")

    def losses(device: str) -> list[float]:
        local = {"augment": "crop-flip"}
        tree = tiny_images.tree(data, base={"name": "cnn", "dtype": "float32"}, local=local, device=device)
        run.train(configfile.from_dict(tree), tmp_path / device)
        return [line["loss"] for line in read_records(tmp_path / device / "metrics.jsonl") if line["kind"] == "round"]

    assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-3)
