"""The faults of `make mutants` can still be planted, and one that is planted is noticed."""

import importlib.util
from pathlib import Path
from unittest import mock

import pytest

RUN = Path(__file__).parents[2] / "scripts/mutants/plant.py"

SMALL = """
from llm_fed.eval.intervals import Estimate


def test_small():
    low, high = Estimate(1.0, 0.5, 9).interval(0.95)
    assert low < 1 < high
"""


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
    """By a test that imports the copy, whatever llm_fed is installed. It lies beside the suite, whose fixtures would
    take seconds to import."""
    mutants.copy_into(tmp_path)
    assert (tmp_path / "tests/eval/test_intervals.py").read_bytes() == (
        mutants.ROOT / "tests/eval/test_intervals.py"
    ).read_bytes()
    (tmp_path / "test_small.py").write_text(SMALL)
    assert mutants.tried(tmp_path, ["test_small.py"], 600) == (True, mock.ANY)
    file = tmp_path / "eval/intervals.py"
    file.write_text(file.read_text().replace("return self.value - half", "return self.value + half"))
    assert mutants.tried(tmp_path, ["test_small.py"], 600) == (False, "test_small.py::test_small")
