"""Texts with labels and numbers: which labels there are, which rows cannot be used, and where they stand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import ColumnsConfig, PartitionConfig, TaskConfig
from llm_fed.tasks.labelled import _form, place_of


def write(folder: Path, **splits: list[dict[str, Any]]) -> TaskConfig:
    """One client `ada` of these rows, and a client `bob` with the same training rows."""
    for client in ("ada", "bob"):
        (folder / client).mkdir(parents=True, exist_ok=True)
        for split, rows in splits.items():
            if client == "ada" or split == "train":
                (folder / client / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return TaskConfig("classification", str(folder), validation=0.0)


def rows(*labels: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"text": f"text {n} of {label}", "label": label, **more} for n, label in enumerate(labels)]


def test_texts_pairs_and_labels(tmp_path):
    config = write(
        tmp_path,
        train=[
            {"premise": "It rains.", "hypothesis": "It is wet.", "label": "yes"},
            {"premise": "It rains.", "hypothesis": "It is dry.", "label": "no"},
        ],
        test=[{"premise": "It snows.", "hypothesis": "It is cold.", "label": "yes"}],
    )
    data = tasks.load(config, 0)
    first, second = data.clients["ada"].train
    assert (first.prompt, first.pair, first.answers) == ("It rains.", "It is wet.", ("yes",))
    assert data.labels == ("no", "yes") and data.base_kind == "sequence-classification"
    assert first.digest != second.digest != replace(second, pair="").digest
    assert first.group == "yes"  # what a partition by label divides by


@pytest.mark.parametrize(
    "labels, classes",
    [
        (("b", "a", "b"), ("a", "b")),
        ((10, 2, 1), ("1", "2", "10")),
        ((1.0, 2.0, 1.0), ("1", "2")),
        ((True, False, True), ("false", "true")),
        (("star 10", "star 9"), ("star 9", "star 10")),
    ],
)
def test_classes_are_those_of_the_data(tmp_path, labels, classes):
    assert tasks.load(write(tmp_path, train=rows(*labels), test=rows(labels[0])), 0).labels == classes


def test_named_labels_count_in_their_order(tmp_path):
    config = replace(write(tmp_path, train=rows("b", "a"), test=rows("a")), labels=("b", "c", "a"))
    assert tasks.load(config, 0).labels == ("b", "c", "a")
    with pytest.raises(UserError, match=r"ada/train.jsonl, line 2: the label 'a' is none of task.labels=\[b, c\]"):
        tasks.load(replace(config, labels=("b", "c")), 0)
    with pytest.raises(UserError, match=r"task.labels=\['a', 'b', 'a'\]: a stands there more than once"):
        tasks.load(replace(config, labels=("a", "b", "a")), 0)


BAD = [
    (("a", "b", 0.5), ("a",), "line 3: the label 0.5 is a number with a fraction.*task.name=regression"),
    (("a", "b"), ("c",), "ada/test.jsonl, line 1: no client has a training row with the label 'c' of this test row"),
    (("Yes", "no", "yes"), ("no",), r"line 3: the label 'yes' differs from 'Yes' \(.*line 1\) in case only"),
    (("a", "a"), ("a",), "line 1: every row has the label 'a', so there is nothing to tell apart"),
    (("a", None), ("a",), "train.jsonl, line 2: column 'label' holds nothing, not text"),
    (("a", ""), ("a",), "train.jsonl, line 2: column 'label' is empty"),
    (("a", ["b"]), ("a",), "train.jsonl, line 2: column 'label' holds list, not text"),
    (("a", "['b', 'c']"), ("a",), "train.jsonl, line 2: column 'label' holds list, not text"),
]  # fmt: skip


@pytest.mark.parametrize("train, test, said", BAD)
def test_rows_that_cannot_be_used_are_named(tmp_path, train, test, said):
    with pytest.raises(UserError, match=said):
        tasks.load(write(tmp_path, train=rows(*train), test=rows(*test)), 0)


@pytest.mark.parametrize(
    "train, test",
    [
        (("a", "b", 5), ("a",)),  # a number among names
        (("a", "b"), ("b", "a")),
        (("yes", "no", "yes "), ("no",)),  # with a space behind it
        ((1, 2, 3, 4, 5), (5,)),
        (("half", "0.5x"), ("half",)),
    ],
)
def test_clean_data_is_read_without_a_word(tmp_path, train, test):
    data = tasks.load(write(tmp_path, train=rows(*train), test=rows(*test)), 0)
    assert len(data.labels) >= 2 and data.reading and not data.reading.for_people()


def test_a_label_of_each_row_is_no_class(tmp_path):
    with pytest.raises(UserError, match="each of the 12 rows has a label of its own.*task.columns.answer=COLUMN"):
        (tmp_path / "ada.jsonl").write_text("\n".join(map(json.dumps, rows(*(f"answer {n}" for n in range(12))))))
        tasks.load(TaskConfig("classification", str(tmp_path)), 0)


def test_numbers(tmp_path):
    config = replace(write(tmp_path, train=rows(0.5, 3, "4.25"), test=rows(2)), name="regression")
    data = tasks.load(config, 0)
    assert [example.answers for example in data.clients["ada"].train] == [("0.5",), ("3",), ("4.25",)]
    assert data.labels == ("number",) and data.metric == "pearson"
    with pytest.raises(UserError, match="line 2: the label 'high' is no number.*task.name=classification"):
        tasks.load(replace(write(tmp_path / "other", train=rows(1, "high"), test=rows(2)), name="regression"), 0)
    with pytest.raises(UserError, match="task.labels names classes, but the task regression predicts a number"):
        tasks.load(replace(config, labels=("a", "b")), 0)


@pytest.mark.parametrize("columns", [{"options": "text"}, {"messages": "text"}])
def test_columns_without_an_effect_are_refused(tmp_path, columns):
    config = replace(write(tmp_path, train=rows("a", "b"), test=rows("a")), columns=ColumnsConfig(**columns))
    with pytest.raises(UserError, match="would have no effect, since texts with labels are read here"):
        tasks.load(config, 0)


def test_labels_are_what_partitions_divide_by(tmp_path):
    (tmp_path / "all.jsonl").write_text("\n".join(map(json.dumps, rows(*"abc" * 20))))
    partition = PartitionConfig("pathological", clients=3, classes=1)
    data = tasks.load(TaskConfig("classification", str(tmp_path / "all.jsonl"), partition=partition), 0)
    assert sorted(len({example.answers for example in client.train}) for client in data.clients.values()) == [1, 1, 1]


@given(st.lists(st.text(min_size=1, max_size=6), min_size=2, max_size=6, unique_by=_form))
def test_every_class_is_found_by_its_name(names):
    assert [place_of(name, names) for name in names] == list(range(len(names)))


def test_places_stand_for_names_unless_names_are_numbers():
    assert place_of("1", ("no", "yes")) == 1 and place_of("2", ("no", "yes")) is None
    assert place_of("1", ("3", "1")) == 1 and place_of("0", ("3", "1")) is None
    assert place_of("YES", ("no", "yes")) == 1 and place_of("maybe", ("no", "yes")) is None
