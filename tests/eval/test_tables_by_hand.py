"""The table of a comparison in every form, from scores that were written by hand."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from llm_fed.eval.costs import Parameters, Traffic
from llm_fed.eval.tables import Result, Row, Table

COSTS = Parameters(server=2_000, down=1_000, up=1_000, client=1_000)


def result(ada: float, bob: float) -> Result:
    return Result("f", 1, {"ada": ada, "bob": bob}, (ada + bob) / 2, min(ada, bob), Traffic(1e6, 2e6, 3e6, 4e6))


def by_hand() -> Table:
    """Ada under `x`: 60, 64: mean 62, std sqrt((4 + 4) / 1) = 2.83; `y|z` has one seed; `late` has no run yet."""
    rows = [
        Row("x", ["method=x"], "x", COSTS, {0: result(60, 10), 1: result(64, 20)}),
        Row("y|z", [], "y", replace(COSTS, up=500), {0: result(62.001, 40)}, {1: "no [space]"}),
        Row("late", [], "late", COSTS),
    ]
    return Table("rouge1", [0, 1], 1_000, rows)


def test_markdown_by_hand():
    lines = by_hand().as_markdown().splitlines()
    cells = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines[:5]]
    assert cells[0][:7] == ["method", "ada", "bob", "average", "worst half", "seeds", "up per round"]
    assert cells[2][:6] == ["x", "62.00 ± 2.83", "15.00 ± 7.07", "38.50 ± 4.95", "15.00 ± 7.07", "2"]
    assert cells[3][:6] == ["y/z", "62.00", "40.00", "51.00", "40.00", "1 of 2"]
    assert cells[2][6:] == ["1.00 MB", "3.00 MB", "2.00 MB", "4.00 MB", "2.00 k (2×)", "1.00 k (1×)", "1.00 k (1×)"]
    assert cells[3][-2] == "1.00 k (1×), 500 (0.5×)"
    assert cells[4][:6] == ["late", "", "", "", "", "0 of 2"] and cells[4][6:10] == [""] * 4
    assert len({len(line) for line in cells}) == 1
    notes = "\n".join(lines[5:])
    assert "sample standard deviation (divided by n - 1)" in notes and "y|z, seed 1 failed: no [space]" in notes
    assert "cannot be known from 1 draw" in notes and "**" not in "".join(map("".join, cells))


def test_what_was_used_of_a_budget_by_hand():
    """x moved 3 MB of 2^20 bytes in one draw and 5 in the other, y 9 in its only one; `late` has no run yet."""
    table = by_hand()
    assert "budget" not in table.as_markdown()
    table.budget = 8
    for row, sizes in zip(table.rows, ([3, 5], [9]), strict=False):
        for seed, size in enumerate(sizes):
            old = row.results[seed]
            row.results[seed] = replace(old, traffic=replace(old.traffic, total=size * 2**20))
    (line,) = [note for note in table.all_notes() if "budget" in note]
    assert line.endswith("both ways) used: x 4 MB, 50.0%; y|z 9 MB, 112.5%, over the budget.")


def test_bold_are_those_that_nobody_is_shown_to_beat():
    """x and y differ by noise of five draws, and both beat z; single clients are never marked."""

    def row(label: str, base: float, turn: int) -> Row:
        results = {seed: result(base + (seed + turn) % 3, base + 5 + seed % 2) for seed in range(5)}
        return Row(label, [], "x", COSTS, results)

    table = Table("rouge1", range(5), 1_000, [row("x", 60, 0), row("y", 60, 1), row("z", 40, 2)])
    lines = [line.split(" | ") for line in table.as_markdown().splitlines()[2:5]]
    bold = [[cell.startswith("**") for cell in line[1:5]] for line in lines]
    assert bold == [[False, False, True, True], [False, False, True, True], [False] * 4]
    text = table.as_markdown()
    assert "no winner can be named among y and x" in text and "x > z by " in text and "Bold in the columns" in text
    assert table.as_json()["verdict"]["columns"]["average"]["bold"] == ["y", "x"]
    assert table.verdict.sentences == table.as_json()["verdict"]["sentences"]


def test_csv_and_json_by_hand():
    table = by_hand()
    x, y, late = csv.DictReader(io.StringIO(table.as_csv()))
    assert float(x["client ada mean"]) == 62 and float(x["client ada std"]) == pytest.approx(8**0.5)
    assert (y["label"], y["seeds done"], y["client ada std"]) == ("y|z", "1", "")
    assert x["bytes up_per_round"] == "1000000.0" and x["bytes down"] == "4000000.0"
    assert (x["parameters server"], y["parameters up"]) == ("2000", "500")
    assert (late["average mean"], late["bytes up"]) == ("", "")
    found = table.as_json()
    assert json.loads(json.dumps(found)) == found
    assert found["rows"][1]["seeds"]["1"] == "failed: no [space]" and found["rows"][2]["clients"]["ada"] is None
    assert found["rows"][0]["clients"]["ada"] == {"mean": 62, "std": pytest.approx(8**0.5)}
    assert table.failed == "y|z seed 1"


def test_many_clients_have_columns_in_csv_alone():
    scores = {f"role-{number}": float(number) for number in range(17)}
    table = Table("rouge1", [0], 1, [Row("x", [], "x", COSTS, {0: replace(result(1, 2), clients=scores)})])
    text = table.as_markdown()
    assert "role-3" not in text and "17 single clients are in table.csv" in text
    assert "client role-16 mean" in table.as_csv()


def test_the_terminal_shows_names_as_they_stand():
    console = Console(width=120, record=True, file=io.StringIO())
    table = by_hand()
    table.rows[0].label = "[bold]x"
    for part in table.for_terminal():
        console.print(part)
    text = console.export_text()
    assert "[bold]x" in text and "62.00" in text and "38.50" in text and "2×" in text


def test_a_narrow_terminal_shows_every_score():
    """Twelve clients and four methods in 80 columns: a line per client; of more methods the averages alone."""
    scores = {f"zone-{number}": 10.0 + number for number in range(12)}
    rows = [Row(f"method {i}", [], "x", COSTS, {0: replace(result(1, 2), clients=scores)}) for i in range(7)]
    for count, shown in ((4, True), (7, False)):
        console = Console(width=80, record=True, file=io.StringIO())
        for part in Table("rouge1", [0], 1, rows[:count]).for_terminal():
            console.print(part)
        text = console.export_text()
        assert ("zone-11" in text) == shown == (text.count("21.00") == count)
        assert all(row.label in text for row in rows[:count]) and "…" not in text


def test_scores_by_client_are_of_rows_that_have_them_all():
    """A row that is not finished, or lacks a client at one seed, is left out."""
    whole, part = replace(result(1, 2), clients={"a": 1.0, "b": 2.0}), replace(result(1, 2), clients={"a": 3.0})
    rows = [Row("whole", [], "x", COSTS, {0: whole, 1: whole}), Row("part", [], "x", COSTS, {0: whole, 1: part})]
    table = Table("rouge1", [0, 1], 1, [*rows, Row("none", [], "x", COSTS)])
    assert table.by_client == {"whole": {"a": [1.0, 1.0], "b": [2.0, 2.0]}}
