"""The script that measures false answers: what the hostile client sends, what is refused, and its table."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import every
import numpy as np
import pytest
import tiny_images
import torch

from llm_fed.state import State

FOLDER = Path(__file__).parents[2] / "scripts" / "studies"
PER_CLIENT = 8


@pytest.fixture
def answers(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("false_answers")


@pytest.fixture
def pictures(answers, tmp_path) -> Path:
    """A file of the form of FEMNIST's."""
    count = answers.CLIENTS * PER_CLIENT
    pixels, labels = tiny_images.arrays(count, size=8)
    path = tmp_path / "femnist.npz"
    place = np.arange(count)
    np.savez(path, x=pixels[..., 0], y=labels, client=place // PER_CLIENT, test=place % PER_CLIENT < 2)
    return path


def test_what_the_hostile_client_sends(answers):
    upload = {"prototypes": torch.ones(2, 3), "counts": torch.tensor([5, 0])}
    false = answers.turned(10**9)(upload)
    assert false["prototypes"].tolist() == [[-1.0] * 3] * 2 and false["counts"].tolist() == [10**9] * 2
    assert answers.turned(None)(upload)["counts"] is upload["counts"]
    extras = {"running_mean": torch.ones(2), "running_var": torch.ones(2), "num_batches_tracked": torch.tensor(3)}
    own = State.of({"a": torch.ones(2)})
    false = answers.statistics(-1000.0, answers.is_variance)(State(own.layout, own.row, extras))
    assert false.row is own.row and false.extras["running_var"].tolist() == [-1000.0] * 2
    assert false.extras["running_mean"].tolist() == [1.0] * 2 and int(false.extras["num_batches_tracked"]) == 3


TURNED = ["turned prototypes, counts of 10^9", "turned prototypes, counts of -10^6"]


@pytest.mark.parametrize("case", every.quick(TURNED, TURNED[:1]))
def test_roles_refuse_what_norms_let_pass(answers, pictures, case):
    checked, norms = (answers.run("fedproto", case, checks, 0, 1, pictures) for checks in answers.CHECKS)
    assert (checked["refused"], norms["refused"]) == (1, 0)
    refused = answers.run("fedproto", "refused", "checked", 0, 1, pictures)
    assert len(checked["scores"]) == answers.CLIENTS - 1 and checked["scores"] == refused["scores"]


def test_the_table(answers):
    """Means 40 and 60 are 50 ± 14.1; a run that ends has no mean."""
    line = {"method": "fedit", "case": "variances of -1000", "draw": 0}
    lines = [
        line | {"checks": "checked", "refused": 3, "scores": {"a": 30.0, "b": 50.0}},
        line | {"checks": "checked", "refused": 3, "scores": {"a": 60.0}},
        line | {"checks": "norms alone", "ended": "not finite"},
    ]
    rows = answers.table(lines).split("\n")
    assert rows[0] == "| method | one of 12 | draws | checked | norms alone |"
    told = "50.0 ± 14.1; 6 answers refused | 1 of 1 runs end with an error"
    assert rows[2:] == [f"| `fedit` | variances of -1000 | 2 | {told} |"]
