"""Paths: a run means the same from any working directory, and what is handed on names no path of this machine."""

import json
import re
import shlex
from pathlib import Path

import pytest
import tiny_images
import torch
import yaml
from equal_runs import adapters
from small_run import Small
from torch.testing import assert_close

from llm_fed.basics import errors
from llm_fed.basics.rng import generator
from llm_fed.experiment import run as experiment
from llm_fed.export import models
from llm_fed.kinds.images import load_images
from llm_fed.models.structure import Full
from llm_fed.runs.reading import read_config
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import paths
from llm_fed.settings.config import BaseConfig, Config, ServerConfig, TaskConfig
from llm_fed.settings.configfile import from_dict


@pytest.fixture
def beside(small, tmp_path, monkeypatch) -> Path:
    """A folder with links to the base and the data, which is the working directory."""
    folder = tmp_path / "home" / "work"
    folder.mkdir(parents=True)
    (folder / "models").mkdir()
    (folder / "models/base").symlink_to(small.base)
    (folder / "mine").symlink_to(small.data)
    monkeypatch.chdir(folder)
    return folder


def relative(small: Small, folder: Path, **changes: object) -> Path:
    changes = {"rounds": 2, "base": {"name": "models/base"}, "task": {"path": "mine"}, **changes}
    return small.config(folder / "c.yaml", **changes)


def mentions(folder: Path, secret: str, names: str = "*") -> list[str]:
    """The files that hold a text."""
    files = [path for path in folder.rglob(names) if path.is_file()]
    assert files
    return [str(path) for path in files if secret.encode() in path.read_bytes()]


def test_the_report_s_own_command_works_from_another_folder(small, llm_fed, beside, monkeypatch):
    """Begun with relative paths; given in the folder that holds the run, as the report says, it gives equal adapters
    and an equal metrics.jsonl."""
    relative(small, beside)
    runs = beside.parent / "runs"
    assert llm_fed("run", "c.yaml", "--out", runs / "first").code == 0
    page = (runs / "first/report.html").read_text()
    (command,) = [each for each in re.findall(r"llm-fed run [^<]*", page) if "first-again" in each]
    monkeypatch.chdir(runs)
    said = llm_fed(*shlex.split(command)[1:])
    assert said.code == 0, said.err
    one, again = adapters(runs / "first"), adapters(runs / "first-again")
    assert one.keys() == again.keys() == {"ada", "bob", "cyd"}
    for client in one:
        for name in one[client]:
            assert_close(again[client][name], one[client][name], rtol=0, atol=0)
    assert (runs / "first/metrics.jsonl").read_bytes() == (runs / "first-again/metrics.jsonl").read_bytes()
    monkeypatch.chdir("/")
    assert llm_fed("eval", runs / "first", "--json").code == 0
    parents = ("--fed", runs / "first/adapters/ada", "--local", runs / "first-again/adapters/ada")
    assert llm_fed("merge", "mean", *parents, "--out", runs / "merged").code == 0  # their base is found from here, too


def test_what_is_handed_on_names_no_path_of_this_machine(small, llm_fed, beside):
    config = relative(small, beside)
    secret, run = str(beside.parent), beside / "run"
    assert llm_fed("run", config, "--out", run).code == 0
    for names in ("report.html", "metrics.jsonl", "timing.jsonl", "summary.json", "README.md"):
        assert not mentions(run, secret, names), names
    page = (run / "report.html").read_text()
    assert "base base" in page and "name: base" in page and "path: mine" in page
    assert llm_fed("export", run, beside / "out").code == 0
    assert not mentions(beside / "out", secret)
    written = json.loads((beside / "out/ada/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "base"
    evaluated = ("eval", "--base", "models/base", "--adapter", beside / "out/ada", "--data", "mine/ada/test.jsonl")
    assert llm_fed(*evaluated).code == 0  # and no warning of another base
    assert secret in (run / "config.yaml").read_text()  # which the run reads again


def test_a_tracker_is_told_no_path_of_this_machine(small, tmp_path, monkeypatch):
    told = []

    class Accelerator:
        def __init__(self, **settings: object):
            pass

        def init_trackers(self, project: str, init_kwargs: dict[str, object]) -> None:
            pass

        class Tracker:
            name = "comet_ml"
            store_init_configuration = staticmethod(told.append)
            finish = staticmethod(lambda: None)

        trackers = (Tracker(),)

    monkeypatch.setattr("llm_fed.runs.trackers.Accelerator", Accelerator)
    with Reporter().tracking(from_dict(small.tree(track={"with": ["comet_ml"]})), tmp_path):
        pass
    (config,) = told
    assert (config["base.name"], config["task.path"]) == ("base", "data")
    assert not [value for value in config.values() if str(small.base.parent) in str(value)]


def test_a_comparison_s_tables_name_no_path_of_this_machine(small, llm_fed, beside, monkeypatch):
    tree = yaml.safe_load(relative(small, beside, rounds=1).read_text())
    wild = [f"base.name={beside}/models/base", "local.lr=1e37", "local.lr_end=1e37"]
    tree["compare"] = {"rows": {"tame": ["method=local"], "wild": ["method=fedit", *wild]}}
    (beside / "c.yaml").write_text(yaml.safe_dump(tree))
    real = experiment.train

    def fails(config: Config, folder: Path, **rest: object):
        if folder.name.startswith("wild"):
            raise errors.RunError(f"cannot write '{folder / 'a b'}' or {folder / 'x'}: no room")
        return real(config, folder, **rest)

    monkeypatch.setattr("llm_fed.experiment.run.train", fails)
    assert llm_fed("compare", "c.yaml", "--out", beside / "out").code == 1
    for name in ("table.md", "table.csv", "table.json"):
        assert not mentions(beside / "out", str(beside.parent), name)
    tame, bad = json.loads((beside / "out/table.json").read_text())["rows"]
    assert tame["seeds"]["0"]["folder"] == "tame-seed0" and bad["words"][1] == "base.name=base"
    assert bad["seeds"]["0"] == "failed: cannot write 'a b' or x: no room"


def test_an_image_model_from_a_folder_does_not_name_it(tmp_path, monkeypatch):
    folder = tiny_images.save(tiny_images.resnet(torch.float32), tmp_path / "secret-place")
    base = load_images(BaseConfig(name=str(folder), dtype="float32"), ("a", "b", "c"), "cpu")
    for number, structure in enumerate((Full(), Full((("one", ""), ("two", "cnn")), "logits"))):
        state = base.draw(structure, generator(0))
        models.write(tmp_path / f"out/{number}", state, structure, base, "card")
    assert not mentions(tmp_path / "out", str(tmp_path))


def test_a_run_with_relative_paths_in_its_folder_continues(small, llm_fed, beside, monkeypatch):
    """As runs from before have them; from another folder the same words would name other data."""
    config = relative(small, beside)
    assert llm_fed("run", config, "--out", "run").code == 0
    saved = beside / "run/config.yaml"
    tree = yaml.safe_load(saved.read_text())
    assert (tree["base"]["name"], tree["task"]["path"]) == (str(beside / "models/base"), str(beside / "mine"))
    tree["base"]["name"], tree["task"]["path"] = "models/base", "mine"
    saved.write_text(yaml.safe_dump(tree))
    for again in ((config,), (config, f"task.path={beside}/mine"), (config, f"base.name={small.base}")):
        said = llm_fed("run", *again, "--out", beside / "run")
        assert said.code == 0 and "is complete" in said.err
    assert read_config(beside / "run").task.path == str(beside / "mine")
    tree["task"]["path"] = str(beside / "mine")
    saved.write_text(yaml.safe_dump(tree))
    (beside / "elsewhere").mkdir()
    monkeypatch.chdir(beside / "elsewhere")
    llm_fed("run", config, "--out", beside / "run").assert_refused("another configuration", "task.path")


def test_a_finished_run_is_complete_also_when_its_data_is_gone(small, llm_fed, beside):
    config = relative(small, beside)
    assert llm_fed("run", config, "--out", "run").code == 0
    (beside / "mine").unlink()
    said = llm_fed("run", config, "--out", "run")
    assert said.code == 0 and "is complete" in said.err


def test_which_names_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("cnn", "owner/model", "data", "file", "planted"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))

    def names(base: str, path: str | None, server: str | None = None) -> tuple[str, str | None, str | None]:
        config = Config(base=BaseConfig(base), task=TaskConfig("planted", path, server=ServerConfig(path=server)))
        whole = paths.absolute(config)
        assert paths.absolute(whole) == whole and whole.task.name == "planted"
        return whole.base.name, whole.task.path, whole.task.server.path

    here = str(tmp_path)
    assert names("cnn", None) == ("cnn", None, None)  # an architecture, whatever folders there are
    assert names("owner/model", "data/") == (f"{here}/owner/model", f"{here}/data", None)
    assert names("other/model", "hf://owner/model", "~/data") == ("other/model", "hf://owner/model", f"{here}/data")
    assert names("./nothing", "no/such") == ("./nothing", "no/such", None)  # refused later, by the name that was given


@pytest.mark.parametrize(
    "text, shown",
    [
        ("base.name=/home/me/x", "base.name=x"),
        ("base.name=~/models/x/", "base.name=x"),
        ("cannot read '/home/my own/x.csv': no", "cannot read 'x.csv': no"),
        ("(/a/b), /c/d; /e: f", "(b), d; e: f"),
        ("task.path=data/x", "task.path=data/x"),
        ("loss/step of Qwen/Qwen3 at https://host/a/b is 1/2", "loss/step of Qwen/Qwen3 at https://host/a/b is 1/2"),
    ],
)
def test_paths_in_texts(text, shown):
    assert paths.public_text(text) == shown
