"""The Dockerfiles: they copy all that a wheel is built from, name a version of all that they start from, and do not run
as root. They were linted with hadolint, and built nowhere yet."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(ROOT.glob("docker/*.Dockerfile"))


def copied(text: str) -> list[str]:
    """The files and folders of the clone that an image is built from."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_versions_are_named_and_the_user_is_not_root(path):
    text = path.read_text()
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in re.findall(r"^FROM (\S+)", text, re.M))
    assert re.search(r" torch==\d+\.\d+\.\d+ ", text)
    users = re.findall(r"^USER (\w+)$", text.rpartition("\nFROM ")[2], re.MULTILINE)
    assert users and users[-1] not in ("root", "0")


def test_both_copy_the_same_and_nothing_that_is_ignored():
    (names,) = {tuple(copied(path.read_text())) for path in FILES}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(FILES) == 2 and kept == set(names)


def test_what_they_copy_makes_the_whole_wheel(tmp_path):
    """As from the clone itself: no module and no run file is missing."""
    for name in copied(FILES[0].read_text()):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "source" / name)
    words = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run([*words, "--wheel-dir", tmp_path, tmp_path / "source"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"llm_fed/cli/program.py", "llm_fed/tasks/__init__.py", "llm_fed/scoring/scores.py"} < names
    assert {f"llm_fed/scripts/runs/{path.name}" for path in ROOT.glob("scripts/runs/*.yaml")} < names
