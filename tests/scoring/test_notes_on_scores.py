"""What is said of test examples and scores: known answers, capped scores, and what a metric means."""

import json

import pytest

from llm_fed.runs.records import read_records
from llm_fed.scoring.rules import known_answers
from llm_fed.scoring.scores import score
from llm_fed.tasks.common import Example


@pytest.mark.parametrize("train, test, words", [
    ("a b", "a b", "2 of 2 tested answers stand in the client's own training rows (2 different)"),
    ("a a b", "A c  a", "2 of 3 tested answers stand in the client's own training rows (1 different)"),
    ("a b", "c", ""),
    ("", "a", ""),
    ("a", "", ""),
])  # fmt: skip
def test_tested_answers_that_training_has_shown(train, test, words):
    """Another client's answers do not count."""

    def examples(answers: str) -> list[Example]:
        return [Example(f"question {place}", (answer,)) for place, answer in enumerate(answers.split())]

    assert known_answers([(examples(train), examples(test))]) == words
    assert known_answers([(examples(train), []), ([], examples(test))]) == ""


# Scores that are capped, or mean something else than one would think


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
