"""Rows of what a Python program has in memory: data frames, `datasets` data sets, Arrow tables and lists."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from llm_fed.basics.errors import UserError, one_line
from llm_fed.rows import Cell, Rows, Source, declared

if TYPE_CHECKING:
    from datasets import Dataset

FORMS = "a data frame, a data set of the library datasets, or a list of rows (dicts, pairs, texts)"


def object_rows(where: str, table: Any) -> Source:
    """The rows of one object, numbered from 0 as Python does."""
    source = Source(where, partial(_read, table))
    if hasattr(table, "to_dict") and hasattr(table, "columns"):  # of pandas, whose dicts keep the last of two
        source.note_names([str(name) for name in table.columns])
    if _is_data_set(table):
        source.features = table.features.to_dict() if table.features else {}
    elif hasattr(table, "to_pylist") and hasattr(table, "schema"):
        source.features = declared.of_schema(source, table.schema)
    elif names := classes_of(table):
        source.features = dict.fromkeys(("label", "answer"), {"_type": "ClassLabel", "names": names})
    return source


def _read(table: Any, source: Source) -> Rows:
    features, where = source.features, source.where
    transformed = _is_data_set(table) and _format_of(table).get("type") == "custom"
    for number, row in enumerate(rows_of(table, where)):
        values = _as_mapping(row, f"{where}[{number}]")
        if transformed:  # it may give texts instead of numbers
            source.features = {name: each for name, each in features.items() if not isinstance(values.get(name), str)}
        yield source.row(f"[{number}]", values)


def classes_of(table: Any) -> list[str]:
    """The names of classes of a data set as torchvision has them, or of a subset of one; empty of any other."""
    while hasattr(table, "dataset") and not hasattr(table, "classes"):
        table = table.dataset
    names = getattr(table, "classes", None)
    return [*map(str, names)] if isinstance(names, list | tuple) else []


def rows_of(table: Any, where: str) -> Iterable[Any]:
    """The rows of an object, as dicts where it has columns. UserError: it has no rows."""
    if _is_data_set(table):
        return _as_it_gives(table, where)
    if hasattr(table, "iloc") and not hasattr(table, "columns"):  # a Series, in which a number is a label of its index
        return table.tolist()
    for method in ("to_pylist", "to_dicts"):  # of Arrow and Polars
        if callable(getattr(table, method, None)):
            return getattr(table, method)()
    if hasattr(table, "columns") and callable(getattr(table, "to_dict", None)):  # of pandas
        named = [name for name in table.index.names if name is not None and name not in table.columns]
        return (table.reset_index(named) if named else table).to_dict("records")
    if not isinstance(table, str | bytes | Mapping):
        if hasattr(table, "__getitem__") and hasattr(table, "__len__"):  # a list, or torch's Dataset
            return (table[index] for index in range(len(table)))
        if isinstance(table, Iterable) and not isinstance(table, Iterator):  # whose rows can be read again
            return table
    raise UserError(f"{where} is {type(table).__name__}; give {FORMS}")


def _is_data_set(table: Any) -> TypeGuard[Dataset]:
    """Whether it is one of the library datasets."""
    return hasattr(table, "with_format") and hasattr(table, "features")


def _format_of(table: Dataset) -> Mapping[str, Any]:
    return getattr(table, "format", None) or {}  # one that is streamed has none


def _as_it_gives(table: Dataset, where: str) -> Iterator[Mapping[str, Cell]]:
    """The rows that a data set gives its user: transformed where it has a transform, without the columns that its
    format hides, and without tensors. UserError: a transform fails, and at which row."""
    form = _format_of(table)
    if form and form["type"] != "custom":
        table = table.with_format(None, columns=None if form["output_all_columns"] else form["columns"])
    elif not form:
        table = table.with_format(None)
    given = 0
    try:
        for row in table:
            yield row
            given += 1
    except Exception as error:  # the user's own function
        said = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"{where}[{given}]: the data set fails to give this row: {said}; correct it") from error


def _as_mapping(row: Any, where: str) -> dict[str, Cell]:
    if isinstance(row, Mapping):
        return {str(key): plain(value) for key, value in row.items()}
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, Sequence) and row and all(isinstance(turn, Mapping) for turn in row):
        return {"messages": plain(row)}
    if isinstance(row, Sequence) and len(row) == 2:
        return {"prompt": plain(row[0]), "answer": plain(row[1])}
    raise UserError(f"{where} is {row!r:.60}; give a dict, a pair of prompt and answer, a list of messages, or a text")


def plain(value: Any) -> Cell:
    """A cell as a file would have it: no number of NumPy, and None for what a frame has in an empty cell."""
    if (isinstance(value, float) and math.isnan(value)) or type(value).__name__ in ("NAType", "NaTType"):
        return None
    if callable(getattr(value, "tolist", None)):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
