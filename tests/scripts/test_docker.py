"""The Dockerfiles: they copy all that a wheel is built from (test_wheel.py builds it of that), name a version of all
that they start from, and do not run as root. They were linted with hadolint, and built nowhere yet."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = sorted(ROOT.glob("docker/*.Dockerfile"))


def copied(text: str) -> list[str]:
    """The files and folders of the clone that an image is built from."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    return [name for line in lines for name in line.split()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_versions_are_named_and_the_user_is_not_root(path):
    text = path.read_text()
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in re.findall(r"^FROM (\S+)", text, re.M))
    torch = re.search(r" torch==(\d+\.\d+\.\d+) ", text)
    needs = {each.name: each.specifier for each in map(Requirement, PROJECT["dependencies"])}
    assert torch and torch[1] in needs["torch"], "pip would replace it by a build with other libraries of CUDA, or none"
    pythons = re.findall(r"^FROM python:(\S+?)-", text, re.MULTILINE)
    assert pythons and all(python in SpecifierSet(PROJECT["requires-python"]) for python in pythons)
    users = re.findall(r"^USER (\w+)$", text.rpartition("\nFROM ")[2], re.MULTILINE)
    assert users and users[-1] not in ("root", "0")


def test_both_copy_the_same_and_nothing_that_is_ignored():
    (names,) = {tuple(copied(path.read_text())) for path in FILES}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert len(FILES) == 2 and kept == set(names)
