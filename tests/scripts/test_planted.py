"""The script that tries FedPool on planted groups: what its rows change, and its table."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "scripts" / "studies"


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("planted")


def test_the_partitions_of_other_rows(script):
    """Two blocks in the sum of all rounds, none in the last one, and what it is told."""
    blocks = torch.block_diag(torch.ones(6, 6, dtype=torch.float64), torch.ones(6, 6, dtype=torch.float64))
    blocks += torch.diag(torch.arange(12) / 100)
    names = [f"c{k:02d}" for k in range(12)]
    state = {"recent": dict.fromkeys(names, 0), "evidence": blocks, "products": torch.eye(12, dtype=torch.float64)}
    none, share, groups = script.FedPool().probable(state)
    assert share > none and sorted(groups) == [names[:6], names[6:]]
    none, share, _ = script.Other(row="last round").probable(state)
    assert share < none
    told = script.Other(row="oracle", groups={name: int(name in names[:2]) for name in names})
    assert told.probable(state) == (0.0, 1.0, [names[2:], names[:2]])


@pytest.mark.slow
def test_two_rounds_with_groups_of_unequal_size(script):
    """Told the groups, the index is 1; FedIT looks for none."""
    found = script.run("oracle", [3, 1], participation=0.5, rounds=2, draw=0)
    assert found["index"] == 1 and len(found["scores"]) == 4
    assert script.run("fedit", [2], participation=1.0, rounds=1, draw=0)["index"] is None


def test_the_index_is_of_what_is_most_probable(script):
    """Groups count only where they are more probable than none; then clients without one share one."""
    groups = {"a": 0, "b": 0, "c": 1, "d": 1}
    right = {"groups": [["a", "b"], ["c", "d"]], "probability": 0.6}
    assert script.index_of({**right, "no_groups": 0.3}, groups) == 1
    assert script.index_of({**right, "no_groups": 0.7}, groups) == 0
    assert script.index_of({"no_groups": 1.0}, groups) == 0
    assert script.index_of({"no_groups": 1.0}, dict.fromkeys(groups, 0)) == 1


def test_the_table(script):
    line = {"sizes": [2, 1], "mixed": 0, "participation": 0.5, "rounds": 4, "row": "fedpool", "index": 0.5}
    first, second = line | {"scores": {"a": 1.0}}, line | {"index": 1.0, "scores": {"a": 2.0, "b": 4.0}}
    mixed = line | {"mixed": 1, "scores": {"a": 2.0, "b": 4.0, "c": 8.0}}
    assert script.table([first, second, mixed]).splitlines()[2:] == [
        "| 2 + 1 | 50% | 4 | fedpool | 2.0 ± 1.4 |  | 0.50, 1.00 | 2 |",
        "| 2 + 1 | 50% | 4 | fedpool | 3.0 | 8.0 | 0.50 | 1 |",
    ]


def test_a_mixed_client_answers_half_of_the_colours_as_each_group(script):
    task, groups, between = script.federation([1, 1, 1], 1, seed=0)
    assert between == ["zoo-04"] and groups["zoo-04"] == 0
    own, first, third = (task.clients[client].test for client in ("zoo-04", "zoo-01", "zoo-03"))
    assert [each.prompt for each in own] == [each.prompt for each in first]
    early = set(script.TRAITS["colour"][:8])
    for mine, one, other in zip(own, first, third, strict=True):
        assert mine == (one if early & set(mine.prompt.split()) else other)
    assert set(own) - set(first) and set(own) - set(third)


def test_one_variance_counts_all_squared_errors_together(script):
    """90 cosines with squared errors of 90 in all have the variance 1, whose logarithm is 0: what is left is the cost
    of two means within groups, one between them and one variance. FedPool takes two variances here."""
    numbers = dict(rest=60.0, within=30, groups=2, others=30.0, between=60, m=12)
    assert script.one_variance(**numbers) == pytest.approx(4 / 2 * math.log(90))
    assert script.fedpool.description_length(**numbers) < script.one_variance(**numbers)
