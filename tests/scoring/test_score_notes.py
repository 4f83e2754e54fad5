"""Scores that are capped, or mean something else than one would think, say so; the others say nothing."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from llm_fed.method.site import Data
from llm_fed.runs.records import read_records
from llm_fed.scoring.evaluation import notes_on_scores
from llm_fed.scoring.scores import score
from llm_fed.tasks.common import Example


def sites(*answers: str) -> list[Any]:
    queries: list[Any] = [Example(f"prompt {n}", (text,)) for n, text in enumerate(answers)]
    return [SimpleNamespace(id="north", data=Data(queries={"test": queries}))]


def test_a_run_says_that_references_are_cut(small, llm_fed, tmp_path):
    """Every reference has two tokens. The plan, the run, its records, `eval` and `compare` say it, with how many."""
    config = small.config(tmp_path / "c.yaml", rounds=1, eval={"max_new_tokens": 1})
    note = (
        "9 of 9 test references are longer than eval.max_new_tokens=1 tokens (the longest has 2), so that even a "
        "perfect answer is cut and scores less; set eval.max_new_tokens=2"
    )
    assert f"warning: {note}" in llm_fed("run", config, "--dry-run", "--out", tmp_path / "run").err
    said = llm_fed("run", config, "--out", tmp_path / "run")
    assert said.code == 0 and said.err.count(f"warning: {note}\n") == 1
    assert "warning: 6 of 6 validation references are longer" in said.err
    events = [line for line in read_records(tmp_path / "run/metrics.jsonl") if line["kind"] == "event"]
    assert [line["event"] for line in events] == ["answers cut"] * 2 and note in [line["reason"] for line in events]
    assert note in json.loads((tmp_path / "run/summary.json").read_text())["notes"]
    assert note in llm_fed("eval", tmp_path / "run", "--json").err
    fits = llm_fed("eval", tmp_path / "run", "eval.max_new_tokens=2", "--json")
    assert fits.code == 0 and "references" not in fits.err
    compared = llm_fed("compare", config, "--methods", "local", "--out", tmp_path / "table", "--json")
    assert note in compared.err
    assert "answers cut" in (tmp_path / "table/table.md").read_text()


@pytest.mark.parametrize(
    "metric, answers, said",
    [
        ("squad_f1", ["the", "cat"], "1 of 2 test examples score 0 under squad_f1 whatever is answered"),
        ("rouge1", ["\U0001f44d", "\U0001f44e"], "2 of 2 test examples score 0 under rouge1 whatever is answered"),
        ("rouge2", ["yes", "no"], "2 of 2 test examples score 0 under rouge2"),
    ],
)
def test_what_a_metric_does_to_references(metric, answers, said):
    notes = notes_on_scores(sites(*answers), metric)
    assert len(notes) == 1 and said in notes[0], notes
    assert notes_on_scores([], metric) == []


@pytest.mark.parametrize(
    "metric, answers",
    [
        ("squad_em", ["B", "C", "D"] * 4),
        ("exact_match", ["yes", "no"] * 9),
        ("rouge1", ["It rains.", "it rained", "5 cats", "6 cats"]),
        ("rougeL", ["\u5317\u4eac", "yes"]),
        ("commonsense_accuracy", ["the answer is true", "the answer is false"] * 3),
    ],
)
def test_clean_references_are_silent(metric, answers):
    assert notes_on_scores(sites(*answers), metric) == []


def test_of_several_right_options_each_is_right():
    """Of three options 0 and 2 are right: the best is 2; 1; 0 and 1 alike, of which half is right."""
    predictions = [[-3.0, -2.0, -1.0], [-3.0, -1.0, -2.0], [-1.0, -1.0, -2.0]]
    assert score("option_accuracy", predictions, [(0, 2)] * 3) == pytest.approx(100 * 1.5 / 3)


def test_options_through_a_run(small, llm_fed, tmp_path):
    rows = [{"instruction": f"w{20 + i}", "output": "w4", "options": ["w4", "w4", "w5"]} for i in range(8)]
    (tmp_path / "d").mkdir()
    for client in ("ada", "bob"):
        (tmp_path / f"d/{client}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"task": {"path": str(tmp_path / "d"), "columns": {"options": "options"}}}
    config = small.config(tmp_path / "c.yaml", rounds=1, **changes)
    said = llm_fed("run", config, "eval.metric=option_accuracy", "local.steps=20", "--out", tmp_path / "run")
    assert said.code == 0
    scores = json.loads((tmp_path / "run/summary.json").read_text())["scores"]["clients"]
    assert set(scores.values()) == {100.0}  # half of it with two copies
