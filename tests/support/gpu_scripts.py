"""scripts/gpu from tests: its shell scripts with pretended Pythons, and its modules."""

import importlib
import os
import subprocess
import sys
import venv
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
GPU = ROOT / "scripts" / "gpu"
OWN = ("OUT", "MODEL", "BUNDLE", "SITE", "LIMIT", "MOST", "PYTHONPATH")


def modules(patch: pytest.MonkeyPatch, *names: str) -> dict[str, ModuleType]:
    patch.setattr(sys, "path", [str(GPU), str(GPU.with_name("bench")), *sys.path])
    return {name: importlib.import_module(name) for name in names}


def bash(*words: object, cwd: Path | None = None, **environment: object) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in OWN}
    known = {**kept, **{key: str(value) for key, value in environment.items()}}
    return subprocess.run(["bash", *map(str, words)], env=known, capture_output=True, text=True, cwd=cwd)


def stub(path: Path, body: str) -> Path:
    """A Python that can be started and writes down how it is called, but for `-c`; then it does this, in sh."""
    path.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\necho "$@" >> {path}.calls\n{body}\n')
    path.chmod(0o755)
    return path


def calls(python: Path, script: str = "step.py") -> list[list[str]]:
    """The words behind the script, of each call of it."""
    called = [line.split() for line in Path(f"{python}.calls").read_text().splitlines()]
    return [words[1:] for words in called if words[0].endswith(f"/{script}")]


def made(out: Path, *words: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """A bundle; skipped where there is no commit to pack."""
    if not (ROOT / ".git").exists():
        pytest.skip("a bundle is made of a commit, and this is no clone")
    return bash(GPU / "bundle.sh", out, *words, **{"PYTHON": sys.executable, **environment})


def bare(folder: Path, carried: ModuleType) -> Path:
    """A Python that has torch, transformers, peft, accelerate and what these require, as links to what this one has."""
    from importlib.metadata import distribution

    venv.create(folder, symlinks=True)
    site = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    for name in carried.closure(carried.PRESENT, without=carried.VARIES):
        its = distribution(name)
        for top in {file.parts[0] for file in its.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(str(its.locate_file(top)))
    return folder / "bin" / "python"
