"""A run folder, its data and its base, which are moved about and changed as people do; whether the run may go on then
is known."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import small_run
from hypothesis import strategies
from small_run import Small

from llm_fed.runs.folder import Run
from llm_fed.settings.configfile import from_dict

DISKS = [Path("/dev/shm"), Path("/tmp")]  # two file systems, where there are two


@dataclass(frozen=True)
class Scene:
    """Where the things lie, and whether they are what they were when the run began.

    Attributes:
        wrong: by key of the configuration, the file that is another one now.
    """

    data: Path
    base: Path
    run: Path
    wrong: tuple[tuple[str, str], ...] = ()

    @property
    def small(self) -> Small:
        return Small(self.base, self.data)

    def changed(self, key: str, file: str) -> Scene:
        return replace(self, wrong=(*self.wrong, (key, file)))


def begin(folder: Path) -> Scene:
    """A run with one round behind it, as far as a folder tells."""
    small = small_run.make(folder)
    (small.data / "README.md").write_text("about the data")
    (small.base / "README.md").write_text("about the base")
    with Run(folder / "run", from_dict(small.tree())) as run:
        run.begin()
        run.remember_inputs()
        run.log({"kind": "round", "round": 1})
    return Scene(small.data, small.base, folder / "run")


Move = Callable[[Scene, Path], Scene]  # given a folder that does not exist yet


def rename_data(scene: Scene, new: Path) -> Scene:
    return replace(scene, data=Path(shutil.move(scene.data, new)))


def rename_base(scene: Scene, new: Path) -> Scene:
    return replace(scene, base=Path(shutil.move(scene.base, new)))


def rename_run(scene: Scene, new: Path) -> Scene:
    return replace(scene, run=Path(shutil.move(scene.run, new)))


def copy_all(scene: Scene, new: Path) -> Scene:
    """As to another machine, where the files have other times."""
    places = {name: new / name for name in ("data", "base", "run")}
    for name, place in places.items():
        shutil.copytree(getattr(scene, name), place, copy_function=shutil.copyfile)
    return Scene(wrong=scene.wrong, **places)


def link_data(scene: Scene, new: Path) -> Scene:
    new.parent.mkdir(parents=True, exist_ok=True)
    new.symlink_to(scene.data, target_is_directory=True)
    return replace(scene, data=new)


def touch(scene: Scene, new: Path) -> Scene:
    for folder in (scene.data, scene.base):
        for path in folder.rglob("*"):
            os.utime(path, (1, 1))
    return scene


def edit_readmes(scene: Scene, new: Path) -> Scene:
    for folder in (scene.data, scene.base):
        (folder / "README.md").write_text(new.name)
        (folder / ".cache").mkdir(exist_ok=True)
        (folder / ".cache/x.json").write_text(new.name)
    return scene


def _flip(path: Path) -> None:
    """One byte, with size and times as they were."""
    times, data = path.stat(), bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def change_row(scene: Scene, new: Path) -> Scene:
    _flip(scene.data / "bob/train.jsonl")
    return scene.changed("task.path", "bob/train.jsonl")


def add_client(scene: Scene, new: Path) -> Scene:
    shutil.copytree(scene.data / "ada", scene.data / new.name)
    return scene.changed("task.path", f"{new.name}/train.jsonl is new")


def lose_client(scene: Scene, new: Path) -> Scene:
    if not (scene.data / "cyd").exists():
        return scene
    shutil.rmtree(scene.data / "cyd")
    return scene.changed("task.path", "cyd/train.jsonl is missing")


def change_weights(scene: Scene, new: Path) -> Scene:
    _flip(scene.base / "model.safetensors")
    return scene.changed("base.name", "model.safetensors")


def change_tokenizer(scene: Scene, new: Path) -> Scene:
    path = scene.base / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")
    return scene.changed("base.name", "tokenizer_config.json")


HARMLESS: tuple[Move, ...] = (rename_data, rename_base, rename_run, copy_all, link_data, touch, edit_readmes)
HARMFUL: tuple[Move, ...] = (change_row, add_client, lose_client, change_weights, change_tokenizer)


def stories(most: int) -> strategies.SearchStrategy[list[tuple[Move, int]]]:
    """Some moves in their order, and onto which disk; half of them with at most one that harms."""
    harmless = strategies.lists(
        strategies.tuples(strategies.sampled_from(HARMLESS), strategies.integers(0, len(DISKS) - 1)), max_size=most
    )
    harmful = strategies.lists(strategies.tuples(strategies.sampled_from(HARMFUL), strategies.just(0)), max_size=1)
    return strategies.tuples(harmless, harmful, harmless).map(lambda parts: [*parts[0], *parts[1], *parts[2]])
