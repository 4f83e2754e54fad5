"""Runs that move: the same files under other paths are the same, others are refused by name."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import small_run
import toy
from equal_runs import StopsAfter, files
from rich.console import Console
from small_run import Small

from llm_fed.basics.errors import RunError, UserError
from llm_fed.commands import api, compare, section
from llm_fed.experiment import run as experiment
from llm_fed.runs import inputs
from llm_fed.runs.folder import Run
from llm_fed.runs.inputs import Contents
from llm_fed.runs.reading import saved_config
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.configfile import as_dict, from_dict

DISKS = [Path("/dev/shm"), Path("/tmp")]  # two file systems, where there are two


@dataclass(frozen=True)
class Scene:
    """Where the things lie."""

    data: Path
    base: Path
    run: Path

    @property
    def small(self) -> Small:
        return Small(self.base, self.data)

    def moved(self, what: str, new: Path) -> Scene:
        """data, base or run are elsewhere, all are a copy as on another machine, or the data are behind a link."""
        if what == "all":
            places = {name: new / name for name in ("data", "base", "run")}
            for name, place in places.items():
                shutil.copytree(getattr(self, name), place, copy_function=shutil.copyfile)
            return Scene(**places)
        if what == "link":
            new.symlink_to(self.data, target_is_directory=True)
            return replace(self, data=new)
        return replace(self, **{what: Path(shutil.move(getattr(self, what), new))})

    def touch(self) -> None:
        """Other times, pages and caches: nothing of the data and the base."""
        for folder in (self.data, self.base):
            (folder / "README.md").write_text("another page")
            (folder / ".cache").mkdir()
            (folder / ".cache/x.json").write_text("{}")
            for path in folder.rglob("*"):
                os.utime(path, (1, 1))

    def spoil(self, file: str) -> None:
        """One bit of a file of the data or the base; or a client comes or goes."""
        if file == "new/train.jsonl is new":
            shutil.copytree(self.data / "ada", self.data / "new")
        elif file == "cyd/train.jsonl is missing":
            shutil.rmtree(self.data / "cyd")
        else:
            flip(next(path for path in (self.data / file, self.base / file) if path.exists()))


def flip(path: Path) -> None:
    """One bit, with size and times as they were."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def begin(folder: Path) -> Scene:
    """A run with one round behind it, as far as a folder tells."""
    small = small_run.make(folder)
    (small.data / "README.md").write_text("about the data")
    (small.base / "README.md").write_text("about the base")
    with Run(folder / "run", from_dict(small.tree())) as run:
        run.begin()
        run.remember(inputs.FILE, run.contents.of(run.config))
        run.log({"kind": "round", "round": 1})
    return Scene(small.data, small.base, folder / "run")


class Listens(Reporter):
    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def begun(tmp_path_factory) -> Scene:
    """A run that has begun; it is copied before it is moved."""
    return begin(tmp_path_factory.mktemp("begun"))


@pytest.fixture
def elsewhere(begun) -> Iterator[Path]:
    """A folder on another disk, where there is one."""
    folder = Path(tempfile.mkdtemp(dir=DISKS[0]))
    yield folder
    shutil.rmtree(folder)


def check_base(run: Run) -> None:
    inputs.check_base(run.folder, as_dict(run.config)["base"], inputs.read(run.folder), run.contents)


def continued(scene: Scene) -> None:
    with Run(scene.run, from_dict(scene.small.tree())) as run:
        check_base(run)
        assert run.continues and run.reached == 0
        run.begin()
        run.remember(inputs.FILE, run.contents.of(run.config))


@pytest.mark.parametrize("moves", [("data",), ("base",), ("run",), ("all",), ("link", "run"), ("data", "base", "all")])
def test_a_run_goes_on_wherever_its_files_lie(begun, tmp_path, elsewhere, moves):
    scene = begun.moved("all", tmp_path / "start")
    for number, what in enumerate(moves):
        scene = scene.moved(what, (elsewhere, tmp_path)[number % 2] / f"new{number}")
    scene.touch()
    continued(scene)
    assert saved_config(scene.run)["task"]["path"] == str(scene.data.absolute())


@pytest.mark.parametrize(
    ("key", "file"),
    [
        ("task.path", "bob/train.jsonl"),
        ("task.path", "new/train.jsonl is new"),
        ("task.path", "cyd/train.jsonl is missing"),
        ("base.name", "model.safetensors"),
        ("base.name", "tokenizer_config.json"),
    ],
)
def test_a_run_does_not_go_on_with_other_files(begun, tmp_path, key, file):
    scene = begun.moved("all", tmp_path / "start")
    if key == "task.path":  # where it always was, other data are a matter of rows
        scene = scene.moved("data", tmp_path / "data")
    scene.spoil(file)
    with pytest.raises(UserError) as refused:
        continued(scene)
    assert key in str(refused.value) and file in str(refused.value)


def test_a_run_that_moves_ends_as_if_it_had_stayed(small, tmp_path):
    """Data, base, run and home under other names, and on another disk where there is one."""
    tree = small.tree(rounds=2, method={"name": "fedmerge", "num_models": 2})
    experiment.train(from_dict(tree), tmp_path / "stays", reporter=Listens())
    with pytest.raises(KeyboardInterrupt):
        experiment.train(from_dict(tree), tmp_path / "run", reporter=StopsAfter(1))
    away = Path(tempfile.mkdtemp(dir=DISKS[0]))
    try:
        for name, place in (("data", small.data), ("base", small.base), ("run", tmp_path / "run")):
            shutil.copytree(place, away / "home" / name)
        moved = small_run.Small(away / "home/base", away / "home/data")
        config = from_dict({**moved.tree(rounds=2), "method": tree["method"]})
        listens = Listens()
        experiment.train(config, away / "home/run", reporter=listens)
        assert "base.name and task.path: the same files as when this run began, under another path" in listens.notes
        expected, found = files(tmp_path / "stays"), files(away / "home/run")
        text = found["config.yaml"].decode().replace(str(away / "home/data"), str(small.data))
        assert (
            text.replace(str(away / "home/base"), str(small.base)).splitlines()[:-1]
            == (expected["config.yaml"].decode().splitlines()[:-1])
        )
        alike = {name for name in expected if "adapters/" in name or name in ("metrics.jsonl", "inputs.json")}
        assert len(alike) > 6 and {name for name in alike if name.endswith((".safetensors", "l", "inputs.json"))}
        for name in alike:
            if name.endswith((".safetensors", "metrics.jsonl", "inputs.json")):
                assert found[name] == expected[name], name
        done = api.run({**moved.tree(rounds=2), "method": tree["method"]}, out=away / "home/run")
        assert done.scores  # a finished run is read, from its new place, too
        shutil.move(away / "home/data", away / "home/other")
        done = api.run(
            {**moved.tree(rounds=2, task={"path": str(away / "home/other")}), "method": tree["method"]},
            out=away / "home/run",
        )
        assert done.scores
    finally:
        shutil.rmtree(away)


def test_runs_of_a_comparison_move_with_it(small, tmp_path):
    """No row is trained again, nor what a row needs; the dtype stays that of the runs."""
    config = small.config(tmp_path / "a.yaml", rounds=1, base={"dtype": "auto"})
    chosen, out = ["local", "potara"], tmp_path / "out"
    before = compare.compare(section.read_rows(config, chosen=chosen), out, reporter=Listens())
    shutil.copytree(small.data, tmp_path / "other")
    shutil.copytree(small.base, tmp_path / "base")
    moved = small_run.Small(tmp_path / "base", tmp_path / "other")
    listens = Listens()
    other = moved.config(tmp_path / "b.yaml", rounds=1, base={"name": str(moved.base), "dtype": "auto"})
    again = compare.compare(section.read_rows(other, chosen=chosen), out, reporter=listens)
    assert not any("run 1 of" in note for note in listens.notes), listens.notes
    assert [row.results[0].average for row in again.rows] == [row.results[0].average for row in before.rows]


def test_a_start_under_another_path(small, tmp_path):
    """Adapters are compared by what they hold, as before."""
    experiment.train(from_dict(small.tree(rounds=1)), tmp_path / "first", reporter=Listens())
    adapter = {"start": str(tmp_path / "first")}
    with pytest.raises(KeyboardInterrupt):
        config = from_dict(small.tree(rounds=2, adapter=adapter))
        experiment.train(config, tmp_path / "second", reporter=StopsAfter(1))
    shutil.move(tmp_path / "first", tmp_path / "elsewhere")
    config = from_dict(small.tree(rounds=2, adapter={"start": str(tmp_path / "elsewhere")}))
    experiment.train(config, tmp_path / "second", reporter=Listens())
    assert saved_config(tmp_path / "second")["adapter"]["start"] == str(tmp_path / "elsewhere")


def test_a_damaged_record_is_named(begun, tmp_path):
    scene = begun.moved("all", tmp_path / "copy")
    path = scene.run / inputs.FILE
    path.write_text(path.read_text().replace("bob/train", "bob/brain"))
    with pytest.raises(RunError, match="inputs.json is damaged: it does not match its checksum"):
        inputs.read(scene.run)


def test_what_is_named_is_read_once_and_as_sha256sum_does(begun, monkeypatch):
    own, config = Contents(), from_dict(begun.small.tree())
    found = own.of(config)
    assert found.keys() == {"base.name", "task.path"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= found["base.name"].keys()
    assert found["task.path"].keys() == {
        f"{client}/{split}.jsonl" for client in small_run.CLIENTS for split in small_run.SIZES
    }
    if sha256sum := shutil.which("sha256sum"):
        said = os.popen(f"{sha256sum} {begun.data}/ada/train.jsonl").read().split()[0]
        assert found["task.path"]["ada/train.jsonl"] == said
    monkeypatch.setattr(inputs, "_digest", lambda path: pytest.fail("read again"))
    assert own.of(config) == found


@pytest.mark.parametrize("name", ["cnn", "Qwen/Qwen3-0.6B", "./nowhere", "a/b/c", "", None, "no such//id", "..\x00"])
def test_what_names_no_files_here(name):
    assert Contents().named("base.name", name) is None and Contents().named("task.path", name) is None


def test_a_base_of_the_hub_and_its_copy(begun, tmp_path, monkeypatch):
    """A name on the Hub and a folder elsewhere are the same base where their files are."""
    cached = tmp_path / "snapshots/abc"
    shutil.copytree(begun.base, cached)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda name, file, revision: str(cached / file) if (name, revision) == ("lab/base", "abc") else None,
    )
    scene = begun.moved("all", tmp_path / "copy")
    tree = scene.small.tree()
    tree["base"] |= {"name": "lab/base", "revision": "abc"}
    with Run(scene.run, from_dict(tree)) as run:
        check_base(run)
        assert "base.name" in run.moved
        run.begin()
    assert saved_config(scene.run)["base"]["revision"] == "abc"
    flip(cached / "model.safetensors")
    with Run(scene.run, from_dict(tree)) as run, pytest.raises(UserError, match="model.safetensors differs.*revision"):
        check_base(run)


def test_a_single_file_may_have_another_name(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    (tmp_path / "b.csv").write_text("x")
    own = Contents()
    one, other = (own.named("task.path", str(tmp_path / name)) for name in ("a.csv", "b.csv"))
    assert one == other and one is not None and set(one) == {"."}


def test_nothing_is_lost_of_what_a_toy_run_writes(tmp_path):
    """A configuration that names no file of this machine has an empty record."""
    with Run(tmp_path / "run", toy.config()) as run:
        run.begin()
        run.remember(inputs.FILE, run.contents.of(run.config))
    assert json.loads((tmp_path / "run" / inputs.FILE).read_text()).keys() == {"checksum"}
