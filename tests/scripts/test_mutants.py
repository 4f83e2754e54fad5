"""The faults of `make mutants` can still be planted, and one that is planted is noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "scripts/mutants/run.py"


@pytest.fixture(scope="module")
def mutants():
    spec = importlib.util.spec_from_file_location("mutants", RUN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_fault_has_one_place_and_tests(mutants):
    faults = mutants.faults()
    assert len({fault["name"] for fault in faults}) == len(faults) >= 40
    for fault in faults:
        assert fault["old"] != fault["new"] and fault["tests"], fault["name"]
        assert all((mutants.ROOT / test).exists() for test in fault["tests"]), fault["name"]


def test_a_fault_that_no_longer_fits_is_named(mutants, tmp_path):
    (tmp_path / "m.yaml").write_text("[{name: gone, file: README.md, old: nowhere at all, new: x, tests: []}]")
    with pytest.raises(SystemExit, match="gone: `old` stands 0 times in README.md"):
        mutants.faults(tmp_path / "m.yaml")


def test_a_planted_fault_is_noticed(mutants, tmp_path):
    mutants.copy_into(tmp_path)
    tests = ["tests/eval/test_intervals.py"]
    assert mutants.tried(tmp_path, tests, 600)[0]
    file = tmp_path / "eval/intervals.py"
    file.write_text(file.read_text().replace("return self.value - half", "return self.value + half"))
    passed, first = mutants.tried(tmp_path, tests, 600)
    assert not passed and first.startswith("tests/eval/test_intervals.py::")
