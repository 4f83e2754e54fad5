"""Rows that compare answers in forms that are not read: the message names the columns and the remedy, and rows that
only look like them are read in silence."""

import pytest
from jsonl import write

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import files

ASKED = "Which ward for a burn?"
RANKED = [{"answer": "Burns.", "rank": 1.0}, {"answer": "No idea.", "rank": 2.0}]


def load(folder, *rows):
    write(folder / "ann.jsonl", [dict(row) for row in rows])
    return files.load(TaskConfig("files", path=str(folder)), 0)


COMPARED = {
    "SHP": ({"history": ASKED, "human_ref_A": "Burns.", "human_ref_B": "No idea.", "labels": 1}, "human_ref_A and"),
    "UltraFeedback": (
        {"instruction": ASKED, "completions": [{"response": "a", "model": "x"}, {"response": "b", "model": "y"}]},
        "if completions has answers to compare",
    ),
    "Nectar": ({"prompt": ASKED, "answers": RANKED, "turns": 1}, "column 'answers' holds lists of answers to compare"),
    "PKU": ({"prompt": ASKED, "response_0": "Burns.", "response_1": "No idea.", "better_response_id": 0}, "response_0"),
    "Arena": ({"question": ASKED, "response_a": "Burns.", "response_b": "No.", "winner": "model_a"}, "response_a and"),
    "WebGPT": ({"question": ASKED, "answer_0": "Burns.", "answer_1": "No.", "score_0": 1.0}, "if answer_0 and"),
}  # fmt: skip


@pytest.mark.parametrize("form", COMPARED)
def test_answers_to_compare_are_named(form, tmp_path):
    row, what = COMPARED[form]
    with pytest.raises(UserError, match="ann.jsonl") as caught:
        load(tmp_path, row, row)
    assert what in str(caught.value) and "column chosen and the other into rejected" in str(caught.value)


def test_a_chosen_answer_without_a_rejected_one_is_named(tmp_path):
    with pytest.raises(UserError, match="if chosen is preferred .* set task.columns.rejected=COLUMN"):
        load(tmp_path, {"prompt": ASKED, "chosen": "Burns.", "other": "No idea."})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "answer": "Burns.", "response_0": "a", "response_1": "b"},
        {"prompt": ASKED, "completion": [{"role": "assistant", "content": "Burns."}]},
        {"question": ASKED, "answers": ["Burns.", "The burns ward."]},
        {"question": ASKED, "answers": {"text": ["Burns."], "answer_start": [3]}},
    ],
)
def test_other_rows_are_read_in_silence(row, tmp_path):
    reading = load(tmp_path, row, {key: value if key != "prompt" else "Who?" for key, value in row.items()}).reading
    assert "chosen" not in reading.roles


def test_rows_of_labels_are_sent_to_their_task(tmp_path):
    with pytest.raises(UserError, match="to learn the label of each text, set task.name=classification"):
        load(tmp_path, {"text": "It broke.", "label": "negative"})


@pytest.mark.parametrize("labels", [("yes", "no"), ("desirable", "undesirable"), (1, -1)])
def test_labels_say_yes_and_no_in_other_words(labels, tmp_path):
    rows = [{"prompt": f"{ASKED} {n}", "completion": "Burns.", "label": label} for n, label in enumerate(labels * 2)]
    client = load(tmp_path, *rows).clients["ann"]
    judged = {example.prompt[-1]: example.desirable for example in (*client.train, *client.test)}
    assert [judged[place] for place in "0123"] == [True, False, True, False]


@pytest.mark.parametrize("rejected", ["Go\u200b there.", "Go\u00a0there.", "\ufeffGo there."])
def test_answers_that_look_alike_are_the_same(rejected, tmp_path):
    with pytest.raises(UserError, match="line 1: the chosen and the rejected answer are the same"):
        load(tmp_path, {"prompt": ASKED, "chosen": "Go there.", "rejected": rejected})


@pytest.mark.parametrize("rejected", ["Go  there.", "go there.", "Go\nthere."])
def test_answers_that_can_be_told_apart_are_compared(rejected, tmp_path):
    client = load(tmp_path, *[{"prompt": ASKED, "chosen": "Go there.", "rejected": rejected}] * 2).clients["ann"]
    assert len(client.train) + len(client.test) == 2


@pytest.mark.parametrize("unseen", ["\u200b", " \u00a0\ufeff", "\u200d"])
def test_an_answer_of_characters_that_cannot_be_seen_is_empty(unseen, tmp_path):
    with pytest.raises(UserError, match="line 1: column 'rejected' is empty"):
        load(tmp_path, {"prompt": ASKED, "chosen": "Burns.", "rejected": unseen})
