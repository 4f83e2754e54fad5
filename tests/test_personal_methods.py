"""The package of methods in examples/personal_methods: outsiders' methods, by the public interface alone."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import every
import pytest

from llm_fed import methods
from llm_fed.settings import plugins
from llm_fed.testing.battery import CHECKS
from llm_fed.testing.federation import ADAPTERS, go

PACKAGE = Path(__file__).parents[1] / "examples" / "personal_methods"
NAMES = {"fedper": "FedPer", "fedrep": "FedRep", "apfl": "APFL", "fedala": "FedALA", "fedamp": "FedAMP"}
# What CONTRIBUTING.md's own example imports, and states, errors.
PUBLIC = {
    "llm_fed.basics.errors", "llm_fed.state.wire", "llm_fed.method", "llm_fed.settings", "llm_fed.method.site",
    "llm_fed.state",
}  # fmt: skip


@pytest.fixture(scope="module")
def metadata(tmp_path_factory) -> Path:
    """The package's metadata, as pip would install it; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("metadata")
    copy = shutil.copytree(PACKAGE, folder / "package")
    made = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('..')"
    subprocess.run([sys.executable, "-c", made], cwd=copy, check=True, capture_output=True)
    return folder


@pytest.fixture
def installed(metadata, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(metadata))
    monkeypatch.syspath_prepend(str(PACKAGE))


@pytest.mark.slow
def test_their_numbers_are_those_of_the_papers():
    """The package's own tests, in a process of their own."""
    environment = {**os.environ, "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0"]
    ended = subprocess.run(command, cwd=PACKAGE, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and "9 passed" in ended.stdout, ended.stdout + ended.stderr


def test_entry_points_name_them(installed):
    assert set(plugins.names(plugins.METHODS)) >= set(NAMES)
    for name, kind in NAMES.items():
        built = methods.build({"name": name})
        assert type(built).__name__ == kind and built.paper
        assert methods.canonical({"name": name}) == {"name": f"personal_methods.{name}:{kind}"}


def test_they_use_the_public_interface_alone():
    for path in (PACKAGE / "personal_methods").glob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        used = {node.module for node in tree if isinstance(node, ast.ImportFrom) and node.module}
        assert {module for module in used if module.startswith("llm_fed")} <= PUBLIC, path.name
        assert len(path.read_text().splitlines()) < 100


@pytest.mark.parametrize("name", every.quick(NAMES, ["fedrep", "fedala"]))
def test_each_federates(installed, name, tmp_path):
    """A part of the battery; `python -m llm_fed.testing` has all of it."""
    setup = ADAPTERS.training(["local.optimizer=sgd", "local.lr=0.5"] if name == "apfl" else [])
    whole = go({"name": name}, setup, tmp_path / "whole")
    for says in ("every message survives the wire", "the loss falls", "all clients at once is 1 at a time"):
        CHECKS[says](whole, tmp_path / says)
