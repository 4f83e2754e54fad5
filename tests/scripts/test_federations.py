"""Federations of desks have the styles that their kind says, and are the same whenever they are made."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "scripts/default/federations.py"
spec = importlib.util.spec_from_file_location("federations", PATH)
assert spec and spec.loader
federations = importlib.util.module_from_spec(spec)
spec.loader.exec_module(federations)

MARKS = ("Dear customer", "Over.", "Hey there!", "- ", "Ahoy", "Ticket received", "Well, let us see", "{")


def styles(folder: Path) -> list[set[int]]:
    """The styles of each client's answers, as numbers."""
    found = []
    for path in sorted(folder.glob("*-train.jsonl")):
        answers = [json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines()]
        assert 12 <= len(answers) <= 24
        found.append({next(i for i, mark in enumerate(MARKS) if mark in answer) for answer in answers})
    return found


@pytest.mark.parametrize(("kind", "clients", "count"), [("styles", 5, 5), ("groups", 8, 3), ("alike", 5, 1)])
def test_each_client_has_one_style_and_the_kind_says_how_many_there_are(tmp_path, kind, clients, count):
    federations.make(tmp_path / "a", kind, clients, (15, 30), seed=0)
    federations.make(tmp_path / "b", kind, clients, (15, 30), seed=0)
    found = styles(tmp_path / "a")
    assert len(found) == clients and all(len(each) == 1 for each in found)
    assert len(set.union(*found)) == count
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
