"""The script that counts how many pairs of a results page's table are in the paper's order."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llm_fed.basics.errors import UserError

ROOT = Path(__file__).parents[2]
TABLE = """# Page

| other | table |
|---|---|
| `a` | 1 |

| method | easy | paper | hard | paper |
|---|---|---|---|---|
| `a` | 50.0 ± 1.0 | 60.0 | 30 | 30.0 |
| `b`, own | 40.0 | 58.0 ± 2.0 | 31.0 | 29.0 |
| `c` | 45.0 | 50.0 | 31.0 | 20.0 |

| `d` | 1 | 1 | 1 | 1 |
"""


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts" / "results"), *sys.path])
    return importlib.import_module("orders")


def test_pairs_by_hand(script, tmp_path):
    """easy: a > b agrees, a > c agrees, b > c differs; hard: a > b is of 1 point, a > c differs, b and c are equal."""
    page = tmp_path / "page.md"
    page.write_text(TABLE)
    columns, rows = script.read_table(page)
    assert (columns, list(rows)) == (["easy", "hard"], ["a", "b, own", "c"])
    found = script.pairs(columns, rows, above=1.0)
    assert [(pair.column, pair.first, pair.second, pair.agrees) for pair in found] == [
        ("easy", "a", "b, own", True),
        ("easy", "a", "c", True),
        ("easy", "b, own", "c", False),
        ("hard", "a", "c", False),
        ("hard", "b, own", "c", False),
    ]
    assert str(found[2]) == "easy: b, own to c -5.0, in the paper +8.0"
    assert len(script.pairs(columns, rows, above=0.5)) == 6
    assert [pair.first for pair in script.pairs(columns, rows, 1.0, "own")] == ["a", "b, own", "b, own"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("# Page\n\n| method | mean |\n|---|---|\n| a | 1 |\n", "has no table"),
        (TABLE.replace("| 45.0 ", "| not run "), "page.md:11: .* without a number"),
        (TABLE.replace("| 45.0 ", ""), "page.md:11: .* without a number"),
    ],
)
def test_what_cannot_be_counted_is_refused(script, tmp_path, text, words):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    with pytest.raises(UserError, match=words):
        script.read_table(page)


def test_the_counts_of_feddles_page_are_those_of_its_table(script):
    page = ROOT / "docs/results/feddle.md"
    text = " ".join(page.read_text().split())
    columns, rows = script.read_table(page)
    for above, words in (
        (1, r"Of the (?P<all>\d+) pairs .*? more than 1 point in the paper, (?P<same>\d+) are"),
        (2, r"more than 2, (?P<same>\d+) of (?P<all>\d+)"),
    ):
        said = re.search(words, text)
        assert said, words
        found = script.pairs(columns, rows, above)
        assert (int(said["same"]), int(said["all"])) == (sum(pair.agrees for pair in found), len(found))
