"""Rows of a user's files (JSON, JSONL, CSV, Parquet) or of a Hub data set, and Examples made of them."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import pyarrow
import pyarrow.parquet

from llm_fed import waits
from llm_fed.config import ColumnsConfig
from llm_fed.errors import UserError, did_you_mean, one_line
from llm_fed.tasks import formats
from llm_fed.tasks.common import Example
from llm_fed.tasks.conversations import turns_of

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz", ".parquet")

USUAL_NAMES = {
    "prompt": ("instruction", "prompt", "question", "input", "inputs"),
    "input": ("input", "context"),
    "answer": ("output", "response", "answer", "completion", "target", "targets", "generated"),
    "options": ("options",),
    "client": ("client", "client_id"),
    "messages": ("messages", "conversations"),
}
REQUIRED = ("prompt", "answer")
_BATCH = 4096  # rows of a Parquet file that are in memory at once


@dataclass(frozen=True)
class Row:
    """One record and where it stands, e.g. `data/train.jsonl, line 7`."""

    where: str
    values: dict[str, Any]


@dataclass(frozen=True)
class FileRows:
    """The rows of one file, read anew whenever one goes through them; UserError with file and line for whatever cannot
    be read."""

    path: Path

    def __iter__(self) -> Iterator[Row]:
        return _rows(self.path)


def read_rows(path: Path) -> list[Row]:
    """All rows of one file at once."""
    return list(FileRows(path))


def _rows(path: Path) -> Iterator[Row]:
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{path} cannot be read; supported are {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as table:
                rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches(_BATCH))
                yield from (Row(f"{path}, row {i}", values) for i, values in enumerate(rows, 1))
            return
        is_csv = path.name.endswith((".csv", ".csv.gz"))
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rb") as file:
            formats.check_bytes(path, file.read(formats.HEAD))
        with opener(path, "rt", encoding="utf-8-sig", newline="" if is_csv else "\n") as file:
            yield from (_csv if is_csv else _json)(file, path)
    except UnicodeDecodeError as error:
        raise formats.not_utf8(path, error) from error
    except (OSError, EOFError, zlib.error, pyarrow.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read: {first_line}; write it again, or leave it out") from error


def hub_rows(name: str, /, **options: Any) -> dict[str, list[Row]]:
    """The rows of a Hub data set by split, through `datasets.load_dataset(name, **options)`."""
    return {
        split: [Row(f"{name} ({split}), row {i}", dict(row)) for i, row in enumerate(cast(Any, part), 1)]
        for split, part in hub_data(name, **options).items()
    }


def hub_data(name: str, /, **options: Any) -> dict[str, Dataset]:
    """A Hub data set by split; UserError where it cannot be read."""
    return _by_split(f"the Hub data set {name!r}", name, **options)


def folder_data(folder: Path) -> dict[str, Dataset]:
    """A folder laid out like a Hub data set, by split; UserError where it cannot be read."""
    return _by_split(f"the folder {folder}", str(folder.resolve()))  # an absolute path is never asked of the Hub


def _by_split(what: str, source: str, **options: Any) -> dict[str, Dataset]:
    import datasets  # takes seconds to import, and a wrong setting is to be named at once
    from datasets.exceptions import DatasetsError

    try:
        data = datasets.load_dataset(source, **options)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:  # also NotImplementedError
        reason = waits.no_locks(error) or str(error).partition("\n")[0]
        raise UserError(f"{what} cannot be read: {reason}") from error
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    return {str(split): cast("Dataset", part) for split, part in splits.items()}


def _json(file: IO[str], path: Path) -> Iterator[Row]:
    """One array of objects, or one object a line; of the latter no more than a line is in memory."""
    first = next((line for line in file if line.strip()), "")
    file.seek(0)
    if _is_object(first):
        records: Iterable[tuple[str, Any]] = _lines(file, path)
    else:
        text = file.read()
        formats.check_json(path, text)
        records = _items(text, path) if text.lstrip().startswith("[") else _lines(text.split("\n"), path)
    for where, record in records:
        if not isinstance(record, dict):
            raise UserError(f"{where}: an object with named columns is needed, got {json.dumps(record)[:60]}")
        yield Row(where, record)


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _lines(lines: Iterable[str], path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield f"{path}, line {number}", json.loads(line)
            except (ValueError, RecursionError) as error:
                raise _malformed(f"{path}, line {number}", error) from error


def _items(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise _malformed(f"{path}{line}", error) from error
    return ((f"{path}, item {i}", record) for i, record in enumerate(records, 1))


def _malformed(where: str, error: Exception) -> UserError:
    """Of text that is no JSON, and of numbers with thousands of digits and brackets in brackets without an end."""
    column = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else one_line(str(error))
    return UserError(f"{where}: malformed JSON ({column}); need one object a line, or one array")


def _csv(file: IO[str], path: Path) -> Iterator[Row]:
    reader = csv.DictReader(file, strict=True)
    try:
        formats.check_header(path, list(reader.fieldnames or ()))
        for values in reader:
            where = f"{path}, line {reader.line_num}"
            if None in values or None in values.values():
                found = "more" if None in values else "fewer"
                raise UserError(f"{where}: {found} fields than in the header; quote texts that hold commas")
            yield Row(where, values)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num + 1}: malformed CSV ({error})") from error


def find_columns(columns: ColumnsConfig, rows: Iterable[Row], where: str) -> dict[str, str]:
    """Role (a field of ColumnsConfig) -> column name: the configured one, else the first usual one."""
    names = list(dict.fromkeys(name for row in rows for name in row.values))
    found = {role: name for role, name in dataclasses.asdict(columns).items() if name is not None}
    for role, name in found.items():
        check_column(f"task.columns.{role}", name, names, where)
    talks = "messages" in found  # named, and not only there beside prompts and answers
    if talks and {*REQUIRED} & found.keys():
        raise UserError(f"{where}: task.columns names messages and a prompt or an answer; give one of the two kinds")
    for role in [role for role in USUAL_NAMES if role not in found and not (talks and role in REQUIRED)]:
        usual = next((n for n in USUAL_NAMES[role] if n in names and n not in found.values()), None)
        if usual:
            found[role] = usual
        elif role in REQUIRED and not any(name in names for name in USUAL_NAMES["messages"]):
            raise UserError(
                f"{where}: no column for the {role} among {', '.join(names)}; set task.columns.{role}=COLUMN"
            )
    if not talks and {*REQUIRED} <= found.keys():
        found.pop("messages", None)
    return found


def check_column(key: str, name: str, names: Iterable[str], where: str) -> None:
    """UserError unless the column that the configuration names under `key` exists."""
    names = list(names)
    if name not in names:
        raise UserError(
            f"{where}: {key}={name!r} is not a column{did_you_mean(name, names)}; known: {', '.join(names)}"
        )


def to_example(row: Row, columns: dict[str, str], group: str) -> Example:
    """The row as an Example: prompt and context joined by an empty line, one reference answer or a list; or a
    conversation whose last turn is the answer."""
    if "messages" in columns:
        if columns["messages"] not in row.values:
            raise UserError(f"{row.where}: the column {columns['messages']!r} is missing; every row needs it")
        *before, last = turns_of(row.values[columns["messages"]], row.where, columns["messages"])
        return Example(tuple(before), (last.content,), (), group)
    prompt = text_of(row, columns["prompt"])
    if row.values.get(columns.get("input", "")) not in (None, ""):
        prompt = f"{prompt}\n\n{text_of(row, columns['input'])}"
    answers = _texts_of(row, columns["answer"])
    given = row.values.get(columns.get("options", "")) is not None
    options = _texts_of(row, columns["options"]) if given else ()
    if options and not set(answers) & set(options):
        raise UserError(f"{row.where}: the answer {answers[0]!r} is none of the options {list(options)}")
    return Example(prompt, answers, options, group)


def text_of(row: Row, column: str) -> str:
    """The text in one column. Numbers and booleans become text as JSON writes them; nothing else does."""
    if column not in row.values:
        raise UserError(f"{row.where}: the column {column!r} is missing; every row needs it")
    return _text(row.values[column], row.where, column)


def _texts_of(row: Row, column: str) -> tuple[str, ...]:
    value = row.values.get(column)
    if not isinstance(value, list):
        return (text_of(row, column),)
    if not value:
        raise UserError(f"{row.where}: the list in column {column!r} is empty; fill it, or drop the row")
    return tuple(_text(each, row.where, column) for each in value)


def _text(value: Any, where: str, column: str) -> str:
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    if not isinstance(value, str):
        kind = "nothing" if value is None else type(value).__name__
        raise UserError(f"{where}: column {column!r} holds {kind}, not text; convert it, or drop the row")
    if not value.strip():
        raise UserError(f"{where}: column {column!r} is empty; fill it, or drop the row")
    return value
