"""What links lead to stays as it is, wherever commands write.

Each command runs once on a clean copy, which shows every file and folder that it makes, changes or opens for writing.
Then one of these is replaced by a link, and the command runs again: to a file of a victim, to a folder of a victim, to
nothing. It may refuse in a line or replace the link; nothing of the victim's may change, and nothing may appear there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_run
from damage import call

from llm_fed.experiment import run
from llm_fed.settings import configfile

# What a command begins with: a finished run, one that a kill has left, or nothing.
COMMANDS = {
    "run": ("whole", ["run", "../c.yaml", "--out", "run", "rounds=3"]),
    "begin": ("empty", ["run", "../c.yaml", "--out", "run"]),
    "fresh": ("whole", ["run", "../c.yaml", "--out", "run", "--fresh"]),
    "continue": ("half", ["run", "../c.yaml", "--out", "run"]),
    "cross": ("alone", ["eval", "run", "--cross"]),
    "audit": ("whole", ["audit", "run", "--sample", "1"]),
    "export": ("whole", ["export", "run", "run/copies"]),
    "merged": ("whole", ["export", "run", "run/models", "--merged", "--client", "ada"]),
    "join": ("whole", ["join", "run", "--data", "../data/ada/test.jsonl", "--out", "run/new"]),
    "merge": ("whole", ["merge", "mean", "--fed", "run", "--local", "run", "--out", "run/both"]),
    "runs": ("whole", ["compare", "--runs", "run", "../origins/alone", "--out", "run/verdict"]),
    "compare": ("empty", ["compare", "../c.yaml", "--methods", "fedit,local", "--seeds", "0,1,2", "--out", "run"]),
    "init": ("empty", ["init", "../data", "--out", "run/mine.yaml", "--base", "../base", "--force"]),
    "flower": ("empty", ["flower", "../c.yaml", "--out", "run/app"]),
}  # fmt: skip
TARGETS = ("file", "folder", "nothing")


class Links:
    """Commands in a folder, whose own runs lie in `run`."""

    def __init__(self, folder: Path):
        self.folder = folder
        small = small_run.make(folder)
        self._config = small.config(folder / "c.yaml", rounds=2, eval={"max_new_tokens": 1, "cross": False})
        origins = folder / "origins"
        for place, words in {origins / "whole": [], origins / "half": [], origins / "alone": ["method=local"]}.items():
            run.train(configfile.load(self._config, words), place)
        (origins / "half" / "summary.json").unlink()
        (origins / "empty").mkdir()

    def cases(self, command: str, most: int) -> Iterator[tuple[str, str, str]]:
        """(command, place, target) of at most so many places, evenly spread."""
        places = self.places(command)
        for place in places[:: -(-len(places) // most)]:
            named = f"run/{place}" in COMMANDS[command][1]  # an output folder that is a link is the user's choice
            yield from ((command, place, target) for target in TARGETS if not (named and target == "folder"))

    def places(self, command: str) -> list[str]:
        """Every path below `run` that the command makes, changes or opens for writing, in a run without links."""
        with self._work(command) as work:
            before, seen = _content(work / "run"), _watched(work / "run")
            code, *said = call(COMMANDS[command][1])
            assert code == 0, (command, said)
            after = _content(work / "run")
        return sorted({path for path in after if before.get(path) != after[path]} | seen)

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
            could_not_verify = command == "audit" and code == 3
            if code not in (0, 1, 2, 3) or "Traceback" in said or (code and not lines and not could_not_verify):
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


_WRITING = ("os.rename", "os.link", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def _watched(folder: Path) -> set[str]:
    """From now on what is opened for writing, made, renamed or deleted below a folder, as a hook cannot be taken away;
    but for names that are drawn anew each time, which nobody can put a link at."""
    found, root = set[str](), os.path.realpath(folder)

    def look(event: str, arguments: tuple[object, ...]) -> None:
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        for path in arguments[:2] if event in _WRITING else arguments[:1] if opened else ():
            whole = os.path.abspath(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else ""
            drawn = whole.endswith(".partial") and len(whole.split(".")[-2]) == 8
            if whole.startswith(root + os.sep) and not drawn:
                found.add(os.path.relpath(whole, root))

    sys.addaudithook(look)
    return found


def _content(folder: Path) -> dict[str, object]:
    """By path what lies there: the bytes of a file, and when it was changed."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def tried(tmp_path_factory) -> Links:
    return Links(tmp_path_factory.mktemp("links"))


@pytest.mark.parametrize(
    ("command", "place", "target"),
    [
        ("cross", "cross.json", "file"),
        ("cross", ".cross.json.partial", "file"),  # the name that was used once
        ("cross", "report.html", "nothing"),
        ("run", "timing.jsonl", "file"),
        ("run", "metrics.jsonl", "file"),
        ("run", ".lock", "file"),
        ("run", ".lock", "nothing"),
        ("run", ".lock.holder", "file"),
        ("run", "checkpoints", "folder"),
        ("run", "checkpoints/rows", "folder"),
        ("run", "adapters", "folder"),
        ("fresh", "adapters", "folder"),
        ("fresh", "checkpoints/round-0002", "folder"),
        ("continue", "checkpoints/.round-0002.partial", "folder"),
        ("continue", "digests.jsonl", "file"),
        ("continue", "adapters/ada", "folder"),
        ("continue", "adapters/.ada.partial", "folder"),
        ("export", "copies/ada", "folder"),
        ("export", "copies/.ada.partial", "folder"),
        ("runs", "verdict/verdict.md", "file"),
        ("compare", "fedit-seed0", "folder"),
    ],
)
def test_what_a_link_leads_to_stays_as_it_is(tried, command, place, target):
    assert tried.check(command, place, target) == ""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_what_links_in_any_place_lead_to_stays_as_it_is(tried, command):
    found = {case: tried.check(*case) for case in tried.cases(command, most=64)}
    assert not any(found.values()), {case: wrong for case, wrong in found.items() if wrong}


def test_a_run_that_another_one_needs_is_no_link(small, llm_fed, tmp_path):
    """A lock was made in the folder that the link leads to."""
    config = small.as_usual().config(tmp_path / "c.yaml", rounds=2, method={"name": "potara"})
    (tmp_path / "victim").mkdir()
    (tmp_path / "run" / "needs").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "run" / "needs" / "fedit").symlink_to(tmp_path / "victim")
    (tmp_path / "run" / "config.yaml").write_text(config.read_text())
    llm_fed("run", config, "--out", tmp_path / "run").assert_refused("needs/fedit is a symbolic link")
    assert not [*(tmp_path / "victim").iterdir()]
