"""A run folder, its data and its base, which are moved about and changed as people do."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import small_run
from small_run import Small

from llm_fed.runs import inputs
from llm_fed.runs.folder import Run
from llm_fed.settings.configfile import from_dict

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
