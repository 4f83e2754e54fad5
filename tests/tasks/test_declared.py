"""What a source declares beside its cells is used: names of classes, transforms, hidden columns, the order of a Series;
in every form of source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow
import pyarrow.feather
import pytest

from llm_fed.basics.errors import UserError
from llm_fed.rows import BadRow, FileRows
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks import given, labelled

NAMES = ["positive", "negative"]  # not in natural order
TEXTS = [f"crate {n}" for n in range(12)]


def declared(labels: list[int | None], names: list[str] = NAMES) -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    return datasets.Dataset.from_dict({"text": TEXTS[: len(labels)], "label": labels}, features=features)


def saved(form: str, folder: Path, rows: datasets.Dataset) -> Any:
    """The path of a file, or an object."""
    if form == "parquet":
        rows.to_parquet(folder / "a.parquet")
        return folder / "a.parquet"
    if form == "arrow":
        rows.save_to_disk(folder / "saved")
        return next((folder / "saved").glob("*.arrow"))
    return {"object": rows, "streamed": rows.to_iterable_dataset(), "tensors": rows.with_format("numpy")}[form]


def rows_of(source: Any) -> list[Any]:
    return list(FileRows(source) if isinstance(source, Path) else given.ObjectRows("data['a']", source))


@pytest.mark.parametrize("form", ["parquet", "arrow", "object", "streamed", "tensors"])
def test_numbers_of_classes_have_the_names_that_are_declared(form, tmp_path):
    rows = rows_of(saved(form, tmp_path, declared([0, 1, 1, -1, 0, 1])))
    assert [row.values["label"] for row in rows] == ["positive", "negative", "negative", None, "positive", "negative"]


def test_a_number_without_a_name_is_a_bad_row(tmp_path):
    table = declared([0, 1, 1]).data.table  # of a file that another program has written on
    table = table.set_column(1, "label", pyarrow.array([0, 1, 2])).replace_schema_metadata(table.schema.metadata)
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    *good, bad = rows_of(tmp_path / "a.feather")
    assert [row.values["label"] for row in good] == NAMES
    assert isinstance(bad, BadRow) and "holds 2, but the data set names 2 classes" in str(bad)


def test_classes_are_trained_under_their_names(tmp_path):
    for client in ("north", "south"):
        (tmp_path / client).mkdir()
        declared([0, 1] * 6).to_parquet(tmp_path / client / "train.parquet")
    data = labelled.load(TaskConfig("classification", path=str(tmp_path)), 0)
    assert data.labels == ("negative", "positive")
    assert [each.answers for each in data.clients["north"].train[:2]] == [("positive",), ("negative",)]


RAW = datasets.Dataset.from_dict({"question": ["Of Ann?", "Of Bob?"], "answer": ["1", "2"], "note": ["Ann", "Bob"]})


def without_names(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {"question": ["Of NAME?" for _ in batch["question"]], "answer": batch["answer"]}


@pytest.mark.parametrize(
    "table, questions, columns",
    [
        (RAW.with_transform(without_names), ["Of NAME?", "Of NAME?"], {"question", "answer"}),
        (RAW.with_format("python", columns=["question", "answer"]), ["Of Ann?", "Of Bob?"], {"question", "answer"}),
        (RAW.with_format("numpy", columns=["question", "answer"]), ["Of Ann?", "Of Bob?"], {"question", "answer"}),
        (RAW.with_format("pandas"), ["Of Ann?", "Of Bob?"], {"question", "answer", "note"}),
        (RAW, ["Of Ann?", "Of Bob?"], {"question", "answer", "note"}),
    ],
    ids=["transform", "hidden", "hidden tensors", "frames", "plain"],
)
def test_rows_are_those_that_the_data_set_gives(table, questions, columns):
    rows = rows_of(table)
    assert [row.values["question"] for row in rows] == questions and {*rows[0].values} == columns
    assert given.checksums({"a": table}) == given.checksums({"a": [dict(row.values) for row in rows]})


def test_a_transform_that_fails_is_named_with_its_row():
    def fails(batch: dict[str, list[str]]) -> dict[str, list[str]]:
        if batch["answer"] == ["2"]:
            raise KeyError("nobody")
        return batch

    with pytest.raises(UserError, match=r"data\['a'\]\[1\]: the data set fails to give this row: KeyError: 'nobody'"):
        rows_of(RAW.with_transform(fails))


FRAME = pd.DataFrame({"text": TEXTS})


@pytest.mark.parametrize(
    "table",
    [
        FRAME["text"], FRAME["text"][FRAME.index % 2 == 0], FRAME["text"].sample(frac=1, random_state=0),
        pd.concat([FRAME["text"][:3], FRAME["text"][:3]]), FRAME[FRAME.index % 2 == 0],
    ],
    ids=["plain", "filtered", "shuffled", "duplicate indices", "frame"],
)  # fmt: skip
def test_a_series_is_read_in_its_order_whatever_its_index(table):
    wanted = (table["text"] if isinstance(table, pd.DataFrame) else table).tolist()
    assert [row.values["text"] for row in rows_of(table)] == wanted


def test_in_python_a_setting_is_a_text():
    with pytest.raises(UserError, match='give the setting "task.columns.answer=COLUMN"'):
        given.load({"a": [{"question": "Where?", "note": "x"}]}, TaskConfig(), 0)
