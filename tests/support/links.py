"""Links in the places where a command writes: what they lead to stays as it is.

    PYTHONPATH=tests/support python tests/support/links.py [--commands NAME ...] [--most 64]

Each command runs once on a clean copy, which shows every file and folder that it makes, changes or opens for writing.
Then each of these is replaced by a link, and the command runs again: to a file of a victim, to a folder of a victim, to
nothing. It may refuse in a line or replace the link; nothing of the victim's may change, and nothing may appear there.
Of a command with more than `--most` places so many are tried, evenly spread: `compare` has 417, in six run folders like
that of `run`, and takes seconds for each.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import campaign
import pytest
import small_run
import without
from damage import call

from llm_fed.experiment import run
from llm_fed.settings import configfile

# What a command begins with: a finished run, one that a kill has left, or nothing.
COMMANDS = {
    "run": ("whole", ["run", "../c.yaml", "--out", "run", "rounds=3"]),
    "begin": ("empty", ["run", "../c.yaml", "--out", "run"]),
    "fresh": ("whole", ["run", "../c.yaml", "--out", "run", "--fresh"]),
    "continue": ("half", ["run", "../c.yaml", "--out", "run"]),
    "cross": ("whole", ["eval", "run", "--cross"]),
    "audit": ("whole", ["audit", "run", "--sample", "1"]),
    "export": ("whole", ["export", "run", "run/copies"]),
    "merged": ("whole", ["export", "run", "run/models", "--merged", "--client", "ada"]),
    "join": ("whole", ["join", "run", "--data", "../data/ada/test.jsonl", "--out", "run/new"]),
    "merge": ("whole", ["merge", "mean", "--fed", "run", "--local", "run", "--out", "run/both"]),
    "runs": ("whole", ["compare", "--runs", "run", "../other", "--out", "run/verdict"]),
    "compare": ("empty", ["compare", "../c.yaml", "--methods", "fedit,local", "--seeds", "0,1,2", "--out", "run"]),
    "init": ("empty", ["init", "../data", "--out", "run/mine.yaml", "--base", "../base", "--force"]),
    "flower": ("empty", ["flower", "../c.yaml", "--out", "run/app"]),
}  # fmt: skip
TARGETS = ("file", "folder", "nothing")
MOST = 64


class Links:
    """Commands in a folder, whose own runs lie in `run`."""

    def __init__(self, folder: Path):
        self.folder = folder
        small = small_run.make(folder)
        self._config = small.config(folder / "c.yaml", rounds=2, eval={"max_new_tokens": 1, "cross": False})
        origins = folder / "origins"
        for place, words in {origins / "whole": [], origins / "half": [], folder / "other": ["method=local"]}.items():
            run.train(configfile.load(self._config, words), place)
        (origins / "half" / "summary.json").unlink()
        (origins / "empty").mkdir()
        self._places: dict[str, list[str]] = {}

    def cases(self, commands: Collection[str] = tuple(COMMANDS), most: int = MOST) -> Iterator[tuple[str, str, str]]:
        """(command, place, target); of each command at most so many places, evenly spread."""
        for command in commands:
            places = self.places(command)
            step = max(1, math.ceil(len(places) / most))
            for place in places[::step]:
                named = f"run/{place}" in COMMANDS[command][1]  # an output folder that is a link is the user's choice
                for target in TARGETS:
                    if not (named and target == "folder"):
                        yield command, place, target

    def places(self, command: str) -> list[str]:
        """Every path below `run` that the command makes, changes or opens for writing, in a run without links."""
        if command not in self._places:
            with self._work(command) as work:
                before, seen = _content(work / "run"), _Watch(work / "run")
                with seen:
                    code, *said = call(COMMANDS[command][1])
                assert code == 0, (command, said)
                after = _content(work / "run")
                changed = {path for path in after if before.get(path) != after[path]}
                self._places[command] = sorted({path for path in changed | seen.paths if path != "."})
        return self._places[command]

    def check(self, command: str, place: str, target: str) -> str:
        """What is wrong; empty if nothing is."""
        with self._work(command) as work:
            victim, link = work / "victim", work / "run" / place
            (victim / "folder").mkdir(parents=True)
            (victim / "file").write_text("precious")
            (victim / "folder" / "thesis.tex").write_text("years of work")
            before = _content(victim)
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)
            else:
                link.unlink(missing_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(victim / target)
            code, out, err = call(COMMANDS[command][1])
            said = out + err
            if _content(victim) != before:
                return f"the victim's folder has changed (exit code {code}): {said[-200:]}"
            lines = [line for line in said.splitlines() if line.startswith("llm-fed: ")]
            if code not in (0, 1, 2) or "Traceback" in said or (code and not lines):
                return f"exit code {code}: {said[-1500:]}"
        return ""

    @contextlib.contextmanager
    def _work(self, command: str) -> Iterator[Path]:
        """A copy of what the command begins with, at the same place each time."""
        work = self.folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(self.folder / "origins" / COMMANDS[command][0], work / "run")
        with contextlib.chdir(work):
            yield work


class _Watch:
    """Notes what is opened for writing, made, renamed or deleted below a folder, but not names that are drawn anew each
    time, which nobody can put a link at."""

    armed: _Watch | None = None
    _hooked = False

    def __init__(self, folder: Path):
        self._folder = os.path.realpath(folder)
        self.paths: set[str] = set()

    def __enter__(self) -> _Watch:
        if not _Watch._hooked:
            sys.addaudithook(_look)
            _Watch._hooked = True
        _Watch.armed = self
        return self

    def __exit__(self, *exception: object) -> None:
        _Watch.armed = None

    def note(self, path: object) -> None:
        whole = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
        drawn = whole.endswith(".partial") and len(whole.split(".")[-2]) == 8
        if whole.startswith(self._folder + os.sep) and not drawn:
            self.paths.add(os.path.relpath(whole, self._folder))


def _look(event: str, arguments: tuple[object, ...]) -> None:
    seen = _Watch.armed
    if seen is None:
        return
    if event == "open":
        if isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            seen.note(arguments[0])
    elif event in ("os.rename", "os.link", "shutil.copyfile"):
        seen.note(arguments[0])
        seen.note(arguments[1])
    elif event in ("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"):
        seen.note(arguments[0])


def _content(folder: Path) -> dict[str, object]:
    """By path what lies there: the bytes of a file, and when it was changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def cases(given: Any) -> Iterator[campaign.Case]:
    patch = pytest.MonkeyPatch()
    without.measures(patch)
    without.pictures(patch)
    with tempfile.TemporaryDirectory() as folder:
        links = Links(Path(folder).resolve())
        for case in links.cases(given.commands, given.most):
            yield case, partial(_verdict, links, case)


def _verdict(links: Links, case: tuple[str, str, str]) -> str:
    wrong = links.check(*case)
    assert not wrong, wrong
    return case[0]


if __name__ == "__main__":
    campaign.main(__doc__, cases, commands=tuple(COMMANDS), most=MOST)
