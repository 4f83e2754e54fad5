"""What is said of test examples and scores: almost training examples, capped scores, and what a metric means."""

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from llm_fed.method.site import Data
from llm_fed.runs.records import read_records
from llm_fed.scoring import duplicates
from llm_fed.scoring.duplicates import known_answers, near_duplicates
from llm_fed.scoring.evaluation import notes_on_scores
from llm_fed.scoring.scores import score
from llm_fed.tasks.common import ClientData, Example, TaskData

WORDS = [
    "fracture", "wrist", "burn", "hand", "chest", "pain", "fever", "cough", "nausea", "ankle", "knee", "shoulder",
    "rash", "bleeding", "allergy", "swelling",
]  # fmt: skip
QUESTION = "Which ward takes a patient with a {} and a {} who also has a {} and {} since the {} of May?"


def questions(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [QUESTION.format(*draw.sample(WORDS, 4), draw.randint(1, 31)) for _ in range(count)]


def found(train: list[str], test: list[str], answers: tuple[str, str] = ("Surgery.", "Surgery.")) -> int:
    """How many of the test prompts are almost one of the training prompts, which another client has."""
    data = TaskData("files", "rouge1", {
        "north": ClientData("north", tuple(Example(text, (answers[0],)) for text in train)),
        "south": ClientData("south", (), (), tuple(Example(text, (answers[1],)) for text in test)),
    })  # fmt: skip
    return near_duplicates(data).count


@pytest.mark.parametrize("almost", [
    "What do I do about a burnt hand on Sunday",
    "Do: what, I do (about) a burnt hand -- on Sunday?!",
    "What do I do about my burnt hand on Sunday?",
    "On Sunday, what do I do about a burnt hand?",
])  # fmt: skip
def test_a_prompt_that_is_almost_another(almost):
    train = [*questions(60), "What do I do about a burnt hand on Sunday?"]
    assert found(train, [almost]) == 1
    assert found(train[:-1], [almost]) == 0
    assert found(train, [almost], ("Surgery.", "The burns unit.")) == 0  # another answer was wanted


def test_chinese_is_compared_by_its_characters():
    train = [f"第{n}号病人应该去哪个科室看病呢" for n in "一二三四五六七八九"] + ["手被开水烫伤以后应该马上怎么办"]
    assert found(train, ["手被开水烫伤了以后应该马上怎么办？"]) == 1
    assert found(train[:-1], ["手被开水烫伤了以后应该马上怎么办？"]) == 0


@pytest.mark.parametrize("template", [
    "Which bay for crate {}?",
    "Which bay for crate {} of customer{} in hall 3?",
    "Classify the following review as positive or negative, and answer with a single word. Review number {}: fine {}",
    "What is {} + {}?",
    "第{}号箱子应该放在哪里{}",
])  # fmt: skip
def test_what_a_template_makes_alike_is_not(template):
    def fill(numbers: range) -> list[str]:
        return [template.format(n, 7 * n + 1000) for n in numbers]

    assert found(fill(range(200)), fill(range(200, 260))) == 0


def test_questions_about_one_text_are_not():
    draw = random.Random(1)
    texts = [
        " ".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) + f" {' '.join(questions(3, n))}" for n in range(9)
    ]
    train = [f"{text} Who wrote part {n} and when was it?" for text in texts for n in range(4)]
    test = [f"{text} Where does line {n} stand?" for text in texts for n in range(4, 7)]
    assert found(train, test, ("the author", "on page two")) == 0


def test_equal_prompts_are_counted_elsewhere_and_none_is_no_pair():
    assert found(questions(30), questions(30)) == 0
    assert near_duplicates(TaskData("files", "rouge1", {"a": ClientData("a", ())})).words() == ""


def test_it_is_said_with_a_pair(small, llm_fed, tmp_path):
    path = tmp_path / "c"
    path.mkdir()
    lines = [f'{{"prompt": "{text}", "answer": "Surgery."}}' for text in questions(40)]
    (path / "north-train.jsonl").write_text("\n".join([*lines, lines[0].replace("patient with a", "patient, with a")]))
    (path / "north-test.jsonl").write_text(
        "\n".join([*(lines[n].replace("Which ward takes", "WHICH ward: takes") for n in range(3)), *lines[5:7]])
    )
    said = llm_fed("init", path, "--base", small.base, "--out", tmp_path / "c.yaml")
    assert said.code == 0, said.err
    (line,) = (line for line in said.out.splitlines() if line.startswith("alike "))
    assert line.startswith("alike      3 of 5 test examples are almost a training example, such as '")
    assert "' of north and '" in line and len(line) < 320
    for file in path.iterdir():
        file.unlink()
    (path / "north.jsonl").write_text(
        "\n".join(f'{{"prompt": "crate {n}", "answer": "bay {n % 4}"}}' for n in range(60))
    )
    assert "alike" not in llm_fed("init", path, "--base", small.base, "--out", tmp_path / "d.yaml").out


def test_of_large_data_some_are_looked_at_and_that_is_said(monkeypatch):
    monkeypatch.setattr(duplicates, "READ", 4)
    texts = [f"clerk a{n} b{n} c{n} d{n} e{n} f{n} g{n}" for n in range(6)]
    train = tuple(Example(text, ("bay",)) for text in texts)
    test = tuple(Example(text.replace("clerk", "klerk"), ("bay",)) for text in texts)
    found = near_duplicates(TaskData("files", "rouge1", {"ada": ClientData("ada", train, (), test)}))
    assert (found.every, found.tested, found.count) == (3, 2, 2)
    assert found.words().endswith("only one example in 3 was looked at")


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
