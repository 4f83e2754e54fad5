"""The script that keeps the scores behind a results page, and says its table and verdict again."""

import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from llm_fed.basics.errors import UserError

SCRIPTS = Path(__file__).parents[2] / "scripts" / "results"
KEPT = Path(__file__).parents[2] / "docs" / "results" / "rows"


@pytest.fixture
def script(monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    return importlib.import_module("kept")


def comparison(folder: Path, scores: dict[str, float], seed: int = 0) -> Path:
    """A folder as `llm-fed compare` leaves it, with one finished run and one that is not."""
    found = {"round": 3, "clients": scores, "traffic": {"up": 2_000_000.0}}
    rows = [{"label": "fedit", "seeds": {str(seed): found, str(seed + 1): None}}]
    folder.mkdir(exist_ok=True)
    (folder / "table.json").write_text(json.dumps({"rows": rows}))
    return folder


def test_what_a_comparison_has_beyond_the_file_is_appended(script, tmp_path):
    first = script.added([], comparison(tmp_path / "a", {"ada": 10.0, "bob": 20.00004}))
    assert first == [{"row": "fedit", "seed": 0, "round": 3, "scores": {"ada": 10.0, "bob": 20.0}, "up": 2_000_000.0}]
    assert script.added(first, tmp_path / "a") == first
    both = script.added(first, comparison(tmp_path / "b", {"ada": 12.0, "bob": 24.0}, seed=1))
    assert [line["seed"] for line in both] == [0, 1]
    table = script.report(both, ["fedit"])
    assert "| fedit | 2 | 16.5 ± 2.1 | 11.0 ± 1.4 | 2.00 |" in table
    assert script.added(first, tmp_path / "b", ["local"]) == first  # of other rows nothing


def test_other_scores_of_a_run_that_is_kept_are_refused(script, tmp_path):
    kept = script.added([], comparison(tmp_path / "a", {"ada": 10.0}))
    with pytest.raises(UserError, match="different scores of fedit with seed 0"):
        script.added(kept, comparison(tmp_path / "a", {"ada": 11.0}))
    with pytest.raises(UserError, match="give the --out of llm-fed compare"):
        script.added(kept, tmp_path / "none")


def test_the_page_says_what_its_scores_say(script):
    """docs/results/fedmoe.md, from the file beside it."""
    lines = [json.loads(line) for line in (KEPT / "fedmoe_gate.jsonl").read_text().splitlines()]
    found = script.report(lines, ["standalone", "fedmoe", "fedmoe gate=even"])
    page = (KEPT.parent / "fedmoe.md").read_text()
    difference, low, high = re.search(r"- standalone > fedmoe by (\S+) \[(\S+), (\S+)\]", found).groups()
    assert f"| training alone > FedMoE | {float(difference):.1f} [{float(low):.1f}, {float(high):.1f}] |" in page
