"""Rows of odd values under preferences and under labels: each is read, or refused with its file, its line and a remedy;
none is dropped without a word, and nothing ends in a traceback."""

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonl import write

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.rows import Row
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks import files
from llm_fed.tasks.examples import Scheme
from llm_fed.tasks.labelled import LabelScheme, place_of

WORDS = st.sampled_from(
    ("Burns.", "burns.", "Bürns", "Bu\u0308rns", "Ｂurns.", "no", "No ", "\u200bno", "\xa0no", "yes", "true", "0",
     "1.0", "1", "-0", "1e3", "nan", "inf", "null", "[1]", "{}", "Human: a", "Which ward?", "\ud800", "</s>", "ﬁn")
)  # fmt: skip
PLAIN = st.one_of(
    WORDS, st.text(max_size=4), st.none(), st.booleans(), st.integers(-2, 3), st.floats(width=32),
    st.just(10**30), st.sampled_from(("", " ", "\t", "\u200b")),
)  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(("user", "assistant", "system", "User ", "bot", 3, None)), "content": PLAIN,
        "from": st.sampled_from(("human", "gpt")), "value": PLAIN, "weight": PLAIN,
    },
)  # fmt: skip
VALUES = st.one_of(
    PLAIN, PLAIN, st.lists(MESSAGE, max_size=3), st.lists(PLAIN, max_size=2), MESSAGE,
    st.lists(MESSAGE, max_size=2).map(lambda value: json.dumps(value, default=str)),
)  # fmt: skip
CLEAN = {"prompt": "Which ward?", "chosen": "Burns.", "rejected": "No idea.", "label": "yes", "text": "a text"}


def outcome(scheme: Scheme, rows: list[dict[str, Any]], line: int) -> Any:
    """The example of the last row; None where it is refused as it is to be."""
    read = [Row(f"ann.jsonl, line {number}", row) for number, row in enumerate(rows, 1)]
    try:
        scheme.learn(read)
        return [scheme.example(row, "") for row in read][-1]
    except UserError as error:
        said = str(error)
        assert said.startswith(("ann.jsonl", "file")) and (f"line {line}" in said or "task.columns" in said), said
        remedies = ("correct", "drop", "fill", "convert", "set ", "needs a role", "must", "task.columns", "keep one")
        assert any(word in said for word in (*remedies, "does not end", "every row needs", "is no ", "may be 0")), said
        return None


def pairs_of(values: list[Any], names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [{name: CLEAN[name] for name in names}, dict(zip(names, values, strict=True))]


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(VALUES, min_size=3, max_size=3), st.booleans())
def test_any_pair_is_compared_or_refused(values, implicit):
    names = ("chosen", "rejected") if implicit else ("prompt", "chosen", "rejected")
    rows = pairs_of(values[: len(names)], names)
    if implicit:
        rows[0] = {"chosen": "Which ward? Burns.", "rejected": "Which ward? No."}
    example = outcome(Scheme(ColumnsConfig(), "file"), rows, 2)
    if example is not None:
        (answer,), other = example.answers, example.rejected[-1].content
        assert answer.strip() and other.strip() and example.rejected[-1].role == "assistant"
        whole = ([*example.prompt] if not isinstance(example.prompt, str) else []), example.rejected
        assert answer.strip() != other.strip() or whole[0][1:] != list(whole[1][1:-1]) or example.fields


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(VALUES, VALUES)
def test_any_label_is_read_or_refused(text, label):
    example = outcome(LabelScheme(ColumnsConfig(), "file"), pairs_of([text, label], ("text", "label")), 2)
    if example is not None:
        (read,) = example.answers
        assert read and read == read.strip() and example.prompt.strip()
        assert unicodedata.is_normalized("NFC", read) and place_of(read, (read, "another")) == 0


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(VALUES, VALUES)
def test_any_judged_answer_is_read_or_refused(answer, label):
    rows = [
        {"prompt": "Which ward?", "completion": "Burns.", "label": True},
        {"prompt": "Which ward?", "completion": answer, "label": label},
    ]
    example = outcome(Scheme(ColumnsConfig(label="label"), "file"), rows, 2)
    assert example is None or (example.desirable in (True, False) and example.answers[0].strip())


def labelled(folder, *labels: str):
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels * 2)]
    (folder / "ada.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tasks.load(TaskConfig("classification", str(folder), validation=0.0), 0)


@pytest.mark.parametrize("other", ["caf\u0065\u0301", "\u200bcafé", "café\u2060", "\xa0café ", "ca\u00adfé"])
def test_labels_that_look_the_same_are_the_same(tmp_path, other):
    assert labelled(tmp_path, "café", other, "bar").labels == ("bar", "café")


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [("Yes", "yes", "case"), ("yes", "ｙｅｓ", "the form of its letters"), ("ﬁn", "fin", "case")],
)
def test_labels_that_differ_in_form_alone_are_named(tmp_path, one, other, what):
    with pytest.raises(UserError, match=f"ada.jsonl, line 2: the label .* in {what}.*; write both alike"):
        labelled(tmp_path, one, other, "bar")


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]


PROMPTS = {
    "the first question": ("Which ward?", True),
    "the last question": ("And then?", True),
    "all as one text": ("User: Which ward?\n\nBot: Burns.\n\nUser: And then?", True),
    "messages": (talk("Which ward?", "Burns.", "And then?"), True),
    "messages after a system text": ([{"role": "system", "content": "Be brief."}, *talk("Which ward?")], True),
    "another question": ("Where is the exit?", False),
    "other messages": (talk("Which ward?", "Surgery.", "And then?"), False),
}


@pytest.mark.parametrize("form", PROMPTS)
def test_a_prompt_beside_whole_conversations_is_theirs(form):
    prompt, fits = PROMPTS[form]
    row = {
        "prompt": prompt, "chosen": talk("Which ward?", "Burns.", "And then?", "Rest."),
        "rejected": talk("Which ward?", "Burns.", "And then?", "Go."),
    }  # fmt: skip
    scheme, read = Scheme(ColumnsConfig(), "file"), Row("ann.jsonl, line 4", row)
    scheme.learn([read])
    if fits:
        assert scheme.example(read, "").answers == ("Rest.",)
    else:
        with pytest.raises(UserError, match=r"line 4: the prompt, .* is not what .*'chosen' begin"):
            scheme.example(read, "")


def test_answers_that_differ_in_how_accents_are_written_are_the_same():
    row = Row("ann.jsonl, line 1", {"prompt": "Where?", "chosen": "The café.", "rejected": "The cafe\u0301. "})
    scheme = Scheme(ColumnsConfig(), "file")
    scheme.learn([row])
    with pytest.raises(UserError, match="are the same"):
        scheme.example(row, "")


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
