"""The notebook in examples/ runs from its first cell to its last, and what it says comes out."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/data_frame.ipynb"


@pytest.mark.parametrize("rounds", [2, pytest.param(40, marks=pytest.mark.slow)])
def test_every_cell(tmp_path, monkeypatch, capsys, rounds):
    """Two rounds run every cell, and all of its rounds learn something."""
    pytest.importorskip("pandas")
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    sources = ["".join(cell["source"]) for cell in cells]
    assert sum(source.count('"rounds": 40') for source in sources) == 1
    for source in sources:
        exec(compile(source.replace('"rounds": 40', f'"rounds": {rounds}'), str(NOTEBOOK), "exec"), names)
    result, scores = names["result"], names["scores"]
    assert list(scores.index) == list(result.adapters) == [f"zoo {number}" for number in range(6)]
    assert rounds == 2 or result.mean > scores["base alone"].mean()
    said = [line for line in capsys.readouterr().out.splitlines() if " says " in line]
    pens = [line.split(" says ")[1].split(" from ")[0] for line in said]
    assert len(pens) == 2 and (rounds == 2 or set(pens) <= set(names["PENS"]))
