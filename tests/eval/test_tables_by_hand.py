"""The table of a comparison in every form, from scores that were written by hand."""

import csv
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from llm_fed.bench.costs import ClientWork, Parameters, Traffic
from llm_fed.eval.tables import ComparisonRow, RunResult, Table

COSTS = Parameters(server=2_000, down=1_000, up=1_000, client=1_000)


def result(ada: float, bob: float) -> RunResult:
    return RunResult("f", 1, {"ada": ada, "bob": bob}, (ada + bob) / 2, min(ada, bob), Traffic(1e6, 2e6, 3e6, 4e6))


def worked(found: RunResult, steps: float) -> RunResult:
    return replace(found, work=ClientWork(steps, 100 * steps + 100, 3e6, steps / 2 + 0.5))


def by_hand() -> Table:
    """Ada under `x`: 60, 64: mean 62, std sqrt((4 + 4) / 1) = 2.83; `y|z` has one seed; `late` has no run yet."""
    rows = [
        ComparisonRow("x", ["method=x"], "x", COSTS, {0: worked(result(60, 10), 1), 1: worked(result(64, 20), 3)}),
        ComparisonRow("y|z", [], "y", replace(COSTS, up=500), {0: result(62.001, 40)}, {1: "no [space]"}),
        ComparisonRow("late", [], "late", COSTS),
    ]
    return Table("rouge1", [0, 1], 1_000, rows)


def test_markdown_by_hand():
    lines = by_hand().as_markdown().splitlines()
    del lines[2:4]  # base and rule, which nobody has scored
    cells = [[cell.strip() for cell in line.replace("\\|", "/").strip("|").split("|")] for line in lines[:5]]
    assert cells[0][:7] == ["method", "ada", "bob", "average", "worst half", "seeds", "steps"]
    assert cells[2][:6] == ["x", "62.00 ± 2.83", "15.00 ± 7.07", "38.50 ± 4.95", "15.00 ± 7.07", "2"]
    assert cells[3][:6] == ["y/z", "62.00", "40.00", "51.00", "40.00", "1 of 2"]
    assert cells[2][6:9] == ["2", "300", "1.5"] and cells[3][6:9] == [""] * 3  # where a run does not say it
    assert cells[2][9:] == ["1.00 MB", "3.00 MB", "2.00 MB", "4.00 MB", "2.00 k (2×)", "1.00 k (1×)", "1.00 k (1×)"]
    assert cells[3][-2] == "1.00 k (1×), 500 (0.5×)"
    assert cells[4][:6] == ["late", "", "", "", "", "0 of 2"] and cells[4][6:13] == [""] * 7
    assert len({len(line) for line in cells}) == 1
    notes = "\n".join(lines[5:])
    assert "sample standard deviation (divided by n - 1)" in notes and "y|z, seed 1 failed: no [space]" in notes
    assert "cannot be known from 1 draw" in notes and "**" not in "".join(map("".join, cells))


def test_bold_are_those_that_nobody_is_shown_to_beat():
    """x and y differ by noise of five draws, and both beat z; single clients are never marked."""

    def row(label: str, base: float, turn: int) -> ComparisonRow:
        results = {seed: result(base + (seed + turn) % 3, base + 5 + seed % 2) for seed in range(5)}
        return ComparisonRow(label, [], "x", COSTS, results)

    table = Table("rouge1", range(5), 1_000, [row("x", 60, 0), row("y", 60, 1), row("z", 40, 2)])
    lines = [line.split(" | ") for line in table.as_markdown().splitlines()[4:7]]
    bold = [[cell.startswith("**") for cell in line[1:5]] for line in lines]
    assert bold == [[False, False, True, False], [False, False, True, False], [False] * 4]
    text = table.as_markdown()
    assert (
        "no winner can be named among y and x" in text and "x > z by " in text and "Bold in the column average" in text
    )
    assert table.as_json()["verdict"]["columns"]["average"]["bold"] == ["y", "x"]
    assert table.verdict.sentences == table.as_json()["verdict"]["sentences"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((40.0, 44.0, 36.0), None),
        ((40.0, 44.4, 80.0), "a client of a takes 40 steps in all, and one of b 44.4, c 80."),
        ((8.0, 40.0, None), "a client of a takes 8 steps in all, and one of b 40."),
        ((None, None, None), None), ((0.0, 0.0, 8.0), "a client of a takes 0 steps in all, and one of c 8."),
    ],
)  # fmt: skip
def test_rows_of_unlike_work_are_named_above_the_verdict(steps, said):
    """By more than a tenth from the first; nothing is said of rows whose runs did not count it."""
    rows = [
        ComparisonRow(label, [], label, COSTS, {0: replace(result(1, 2), work=work)})
        for label, own in zip("abc", steps, strict=True)
        for work in [None if own is None else ClientWork(own, 100.0, 0.0, own)]
    ]
    table = Table("rouge1", [0], 1_000, rows)
    assert table.unequal == ([f"Not at equal work: {said}"] if said else [])
    text = table.as_markdown()
    assert not said or text.index(said) < text.index("cannot be known from 1 draw")
    assert table.as_json()["unequal"] == table.unequal


def test_csv_and_json_by_hand():
    table = by_hand()
    base, rule, x, y, late = csv.DictReader(io.StringIO(table.as_csv()))
    assert [(row["label"], row["average mean"]) for row in (base, rule)] == [("base", ""), ("rule", "")]
    assert float(x["client ada mean"]) == 62 and float(x["client ada std"]) == pytest.approx(8**0.5)
    assert (y["label"], y["seeds done"], y["client ada std"]) == ("y|z", "1", "")
    assert x["bytes up_per_round"] == "1000000.0" and x["bytes down"] == "4000000.0"
    assert (x["work steps"], x["work tokens"], y["work steps"]) == ("2.0", "300.0", "")
    assert (x["parameters server"], y["parameters up"]) == ("2000", "500")
    assert (late["average mean"], late["bytes up"]) == ("", "")
    found = table.as_json()
    assert json.loads(json.dumps(found)) == found
    assert found["rows"][1]["seeds"]["1"] == "failed: no [space]" and found["rows"][2]["clients"]["ada"] is None
    assert found["rows"][0]["clients"]["ada"] == {"mean": 62, "std": pytest.approx(8**0.5)}
    assert table.failed == "y|z seed 1"


def scored(mean: float, rules: dict[str, str] | None = None) -> dict[str, Any]:
    """A line of metrics.jsonl of two clients with equal scores."""
    line = {"metric": "rouge1", "clients": {"ada": mean, "bob": mean}, "mean": mean, "std": 0.0, "worst_half": mean}
    return line | ({"rules": rules} if rules else {})


RULES = {"ada": "copy of the prompt", "bob": "first option"}


def with_baselines(draws: int, **rows: float) -> Table:
    """Methods that have their score in each draw, plus the draw; a rule of 50 plus a third of the draw."""
    found = []
    for label, mean in rows.items():
        results = {
            seed: replace(
                result(mean + seed, mean + seed), base=scored(10), rule=scored(50 + seed / 3, RULES), shared=f"{seed}"
            )
            for seed in range(draws)
        }
        found.append(ComparisonRow(label, [], "m", COSTS, results))
    return Table("rouge1", range(draws), 1_000, found)


def test_validation_chooses_among_methods_and_not_the_control():
    scores = {"pooled": 90.0, "local": 70.0, "fedit": 80.0}
    rows = [
        ComparisonRow(name, [], name, COSTS, {0: replace(result(1, 2), validation=score)})
        for name, score in scores.items()
    ]
    assert list(Table("rouge1", [0], 1, rows).by_validation.items()) == [("fedit", 80.0), ("local", 70.0)]


def test_base_and_rule_come_first_and_are_no_methods():
    table = with_baselines(3, good=60, bad=40)
    labels = [line.split(" | ")[0].strip("| ") for line in table.as_markdown().splitlines()[2:6]]
    assert labels == ["base", "rule", "good", "bad"]
    found = table.as_json()
    assert found["base"]["average"]["mean"] == 10 and found["rule"]["average"]["mean"] == pytest.approx(50 + 1 / 3)
    assert (
        found["rule"]["seeds"]["0"]["rule"]["rules"] == RULES
        and found["rows"][0]["seeds"]["0"]["rule"]["rules"] == RULES
    )
    pairs = found["verdict"]["columns"]["average"]["pairs"]
    assert {pair["first"] for pair in pairs} | {pair["second"] for pair in pairs} == {"good", "bad"}


def test_a_line_says_which_methods_are_not_shown_to_be_above_the_rule():
    """Differences to the rule are mean - 50 + 2/3 of the draw: 10.67 ± 0.67, 0.17 ± 0.67 and -9.33 ± 0.67; of three
    methods and one control in three draws the half width is some 10 standard errors of 0.38."""
    table = with_baselines(3, good=60, even=49.5, bad=40)
    said = "good is shown to be above rule; bad is shown to be below rule; even is not shown to be above rule"
    assert f"average over the clients: {said}" in table.verdict.sentences
    assert said in table.as_markdown() and said in "".join(map(str, table.for_terminal()))
    assert table.as_json()["verdict"]["rule"]["average"]["above"] == ["good"]
    few = with_baselines(2, good=60, even=49.5).verdict.sentences
    unknown = "against rule, which trains nothing: cannot be known from 2 draws (observed: "
    assert [line for line in few if unknown in line] and not [line for line in few if "shown to be above" in line]


def test_rows_with_other_data_have_other_baselines():
    table = with_baselines(2, one=60, two=40, other=50)
    for seed, old in table.rows[2].results.items():
        table.rows[2].results[seed] = replace(old, base=scored(11), shared=f"other {seed}")
    assert [row.label for row in table.baselines["base"]] == ["base of one, two", "base of other"]
    assert [row.label for row in table.baselines["rule"]] == ["rule"]  # the same scores
    found = table.as_json()
    assert found["base"] is None and len(found["baselines"]["base"]) == 2 and found["rule"]["label"] == "rule"


def test_a_run_of_before_takes_what_others_on_its_data_have():
    table = with_baselines(3, new=60, old=40)
    for seed, result in table.rows[1].results.items():
        table.rows[1].results[seed] = replace(result, base=None, rule=None)
    assert len(table.baselines["base"]) == 1 and table.as_json()["verdict"]["rule"]["average"]["below"] == ["old"]
    for seed, result in table.rows[0].results.items():
        table.rows[0].results[seed] = replace(result, base=None, rule=None)
    lines = [line.split(" | ") for line in table.as_markdown().splitlines()[2:4]]
    assert [(line[0].strip("| "), line[3], line[4]) for line in lines] == [("base", "-", "-"), ("rule", "-", "-")]
    assert not table.verdict.of_rules and '"-": these runs have not scored it' in table.as_markdown()


def test_many_clients_have_columns_in_csv_alone():
    scores = {f"role-{number}": float(number) for number in range(17)}
    table = Table("rouge1", [0], 1, [ComparisonRow("x", [], "x", COSTS, {0: replace(result(1, 2), clients=scores)})])
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


@pytest.mark.parametrize("beside", [{}, {"base ability": 0.01}, {"base ability": 0.01, "margin": 1.5}])
def test_a_narrow_terminal_shows_every_score(beside):
    """Twelve clients and four methods in 80 columns: a line per client; of more methods the averages alone."""
    scores, found = {f"zone-{number}": 10.0 + number for number in range(12)}, worked(result(1, 2), 1000)
    rows = [
        ComparisonRow(f"method {i}", [], "x", COSTS, {0: replace(found, clients=scores, beside=beside)})
        for i in range(7)
    ]
    for count, shown in ((4, True), (7, False)):
        console = Console(width=80, record=True, file=io.StringIO())
        for part in Table("rouge1", [0], 1, rows[:count]).for_terminal():
            console.print(part)
        text = console.export_text()
        assert ("zone-11" in text) == shown == (text.count("21.00") == count)
        assert all(row.label in text for row in rows[:count]) and "…" not in text
