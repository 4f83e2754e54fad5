"""Rows that compare answers in forms that are not read: the message names the columns and the remedy, and rows that
only look like them are read in silence."""

import pytest
from jsonl import write

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import files

ASKED = "Which ward for a burn?"


def load(folder, *rows):
    write(folder / "ann.jsonl", [dict(row) for row in rows])
    return files.load(TaskConfig("files", path=str(folder)), 0)


def test_a_chosen_answer_without_a_rejected_one_is_named(tmp_path):
    with pytest.raises(UserError, match="if chosen is preferred .* set task.columns.rejected=COLUMN"):
        load(tmp_path, {"prompt": ASKED, "chosen": "Burns.", "other": "No idea."})


def test_rows_of_labels_are_sent_to_their_task(tmp_path):
    with pytest.raises(UserError, match="to learn the label of each text, set task.name=classification"):
        load(tmp_path, {"text": "It broke.", "label": "negative"})


@pytest.mark.parametrize("rejected", ["Go\u200b there.", "Go\u00a0there.", "\ufeffGo there."])
def test_answers_that_look_alike_are_the_same(rejected, tmp_path):
    with pytest.raises(UserError, match="line 1: the chosen and the rejected answer are the same"):
        load(tmp_path, {"prompt": ASKED, "chosen": "Go there.", "rejected": rejected})


@pytest.mark.parametrize("rejected", ["Go  there.", "go there.", "Go\nthere."])
def test_answers_that_can_be_told_apart_are_compared(rejected, tmp_path):
    client = load(tmp_path, *[{"prompt": ASKED, "chosen": "Go there.", "rejected": rejected}] * 2).clients["ann"]
    assert len(client.train) + len(client.test) == 2
