"""The workflows name files, extras and Pythons that are there, and nothing is published before its tests."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from llm_fed.basics import documents

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def jobs(name: str) -> dict[str, Any]:
    return documents.load((ROOT / f".github/workflows/{name}.yml").read_text())["jobs"]


def test_nothing_is_published_before_the_wheel_is_tested():
    found = jobs("release")
    assert {found[name]["needs"] for name in ("pypi", "images")} == {"test"} and found["test"]["needs"] == "build"
    assert found["pypi"]["permissions"] == {"id-token": "write"}
    matrix = found["test"]["strategy"]["matrix"]
    pythons = (ROOT / "scripts/release.sh").read_text().partition("for version in ")[2].partition(";")[0].split()
    assert matrix["python"] == pythons and matrix["os"] == ["ubuntu-latest", "macos-latest"]
    for image in found["images"]["strategy"]["matrix"]["image"]:
        assert (ROOT / f"docker/{image}.Dockerfile").is_file()
    said = "\n".join(step.get("run", "") for job in [*found.values(), *jobs("docs").values()] for step in job["steps"])
    for word in said.replace("\\", "").split():
        assert not word.startswith("tests/") or (ROOT / word).exists(), word
    assert "[dev]" in said and "[docs]" in said and {"dev", "docs"} <= PROJECT["optional-dependencies"].keys()


def test_the_package_says_where_it_lives_and_runs():
    assert {"Operating System :: POSIX :: Linux", "Operating System :: MacOS"} <= set(PROJECT["classifiers"])
    assert {"Homepage", "Documentation", "Repository", "Changelog"} == PROJECT["urls"].keys()


@pytest.mark.parametrize("code", ["import llm_fed.cli", "import llm_fed; llm_fed.run"])
def test_windows_is_refused_by_name(code):
    words = [sys.executable, "-c", f"import sys; sys.platform = 'win32'; {code}"]
    said = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1 and "on Windows, install it in WSL" in said.stderr.splitlines()[-1]
