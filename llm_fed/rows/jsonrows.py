"""Rows of JSON: an object a line, one array, objects over several lines, or one object that holds all rows.

{"question": "Which ward?", "answer": "Surgery."}
[{"question": "Which ward?", "answer": "Surgery."}, ...]
{"data": [{"question": "Which ward?", "answer": "Surgery."}, ...], "version": 2}
{"train": [{...}, ...], "test": [{...}, ...]}
{"question": {"0": "Which ward?", ...}, "answer": {"0": "Surgery.", ...}}        pandas, DataFrame.to_json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from llm_fed.basics.errors import UserError, one_line
from llm_fed.rows import BadRow, FileRows, Row, formats
from llm_fed.rows.dialects import is_table
from llm_fed.rows.layout import split_of

CHECKED = 50  # first objects of a file whose keys are looked at for one that is there twice
_SPLIT = "split"  # the column that says the split of rows under a key of that name
_MARGIN = 16  # letters before the end of what is known so far, within which a mistake may be only an end
_DECODER = json.JSONDecoder()
_ERRORS = (ValueError, RecursionError)  # also of numbers with thousands of digits, and of brackets without an end


def rows(file: FileRows, encoding: str) -> Iterator[Row | BadRow]:
    """The rows of a file; UserError where it is malformed and no line can be left out alone."""
    from llm_fed.rows import tables

    text = formats.TextFile(file.path, encoding)
    lines = text.first_lines()
    first = lines[0].strip() if lines else ""
    if first and not formats.is_json(first) and is_table(first):
        file.remark("as CSV")
        yield from tables.csv_rows(file, encoding)
        return
    if len(lines) > 1 and first != "{" and not first.startswith("[") and any(map(_is_object, lines)):
        yield from _lines(file, text)
    else:
        yield from _whole(file, text)
    file.remark(text.remark)


def _is_object(line: str) -> bool:
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except _ERRORS:
        return False


def _lines(file: FileRows, text: formats.TextFile) -> Iterator[Row | BadRow]:
    """Of one object a line no more than a line is in memory."""
    for number, line in enumerate(text.lines(), 1):
        if not line.strip():
            continue
        where = f"{file.path}, line {number}"
        if formats.damaged(line):
            yield BadRow(where, "bytes that are not UTF-8; write the line again")
            continue
        try:
            record = json.loads(line, object_pairs_hook=_noting(file) if number <= CHECKED else None)
        except _ERRORS as error:
            at = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield BadRow(where, f"malformed JSON ({one_line(at)}); need one object a line, or one array")
            continue
        yield _row(where, record)


def _whole(file: FileRows, text: formats.TextFile) -> Iterator[Row | BadRow]:
    """Values one after another, or in one array."""
    values = _values(file, text)
    first = next(values, None)
    if first is None:
        return
    second = next(values, None)
    line, in_array, record = first
    if second is None and not in_array and isinstance(record, dict):
        rows = _contained(record, file)
        is_row = rows == [record]
        file.alone = is_row and formats.suffix_of(file.path.name) == ".json"
        at = [f"line {line}"] if is_row else [f"item {i}" for i, _ in enumerate(rows, 1)]
        yield from (_row(f"{file.path}, {where}", each) for where, each in zip(at, rows, strict=True))
        return
    for line, _, record in chain([first], [second] if second else [], values):
        yield _row(f"{file.path}, line {line}", record)


def _row(where: str, record: Any) -> Row | BadRow:
    if not isinstance(record, dict):
        return BadRow(where, f"an object with named columns is needed, got {one_line(json.dumps(record), 60)}")
    return Row(where, record)


def _values(file: FileRows, text: formats.TextFile) -> Iterator[tuple[int, bool, Any]]:
    """(line, whether it stands in an array, value) of each value; no more than a few are in memory."""
    buffer, in_array, ready, number = _Buffer(text), False, True, 0
    while buffer.skip_blanks():
        sign = buffer.text[buffer.place]
        if (sign == "[" and not in_array) or (sign == "]" and in_array) or (sign == "," and not (in_array and ready)):
            in_array = sign == "[" if sign != "," else in_array
            ready = True
            buffer.place += 1
            continue
        if not ready:
            raise _not_json(file, buffer, ValueError("a comma is missing"))
        number += 1
        line, value = buffer.line, _value(file, buffer, number <= CHECKED)
        ready = not in_array
        yield line, in_array, value
    if in_array:
        raise _not_json(file, buffer, ValueError("the array has no end"))


def _value(file: FileRows, buffer: _Buffer, noting: bool) -> Any:
    """The value that begins here; the buffer moves behind it."""
    decoder = json.JSONDecoder(object_pairs_hook=_noting(file)) if noting else _DECODER
    while True:
        try:
            value, end = decoder.raw_decode(buffer.text, buffer.place)
        except _ERRORS as error:
            if not buffer.may_go_on(error) or not buffer.fill():
                raise _not_json(file, buffer, error) from error
            continue
        if end == len(buffer.text) and buffer.fill():
            continue  # a number may go on
        buffer.place = end
        return value


class _Buffer:
    """A piece of a text that moves on through it."""

    def __init__(self, text: formats.TextFile):
        self._chunks = text.chunks()
        self.text, self.place = "", 0
        self._lines, self._columns = 1, 0  # of what lies before it

    @property
    def line(self) -> int:
        return self._lines + self.text.count("\n", 0, self.place)

    def position(self, error: Exception) -> str:
        """Where a mistake is, in lines of the file."""
        place = error.pos if isinstance(error, json.JSONDecodeError) else self.place
        before = self.text[:place]
        column = place - before.rfind("\n") + (0 if "\n" in before else self._columns)
        return f"line {self._lines + before.count(chr(10))}: malformed JSON (column {column}: "

    def skip_blanks(self) -> bool:
        """Go to the next letter that is not blank; whether there is one."""
        while True:
            rest = self.text[self.place : self.place + 1]
            if not rest and not self.fill():
                return False
            if rest and not rest.isspace():
                return True
            self.place += len(rest)

    def may_go_on(self, error: Exception) -> bool:
        """Whether a mistake may be only that the rest is not there yet."""
        is_syntax = isinstance(error, json.JSONDecodeError) and not error.msg.startswith("Unterminated")
        return not is_syntax or error.pos >= len(self.text) - _MARGIN  # type: ignore[attr-defined]

    def fill(self) -> bool:
        """Read on, at least as much as there is already; whether there was anything."""
        size, pieces = 0, list[str]()
        while size <= len(self.text) - self.place and (piece := next(self._chunks, "")):
            pieces.append(piece)
            size += len(piece)
        if not pieces:
            return False
        before, rest = self.text[: self.place], self.text[self.place :]
        self._lines += before.count("\n")
        self._columns = len(before) - before.rfind("\n") - 1 + (0 if "\n" in before else self._columns)
        self.text, self.place = "".join([rest, *pieces]), 0
        return True


def _noting(file: FileRows) -> Any:
    """A hook that notes names which an object has twice."""

    def hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            file.note_names([name for name, _ in pairs])
        return values

    return hook


def _contained(record: dict[str, Any], file: FileRows) -> list[Any]:
    """The rows that a whole file holds as one object; by default the object itself."""
    values = list(record.values())
    lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
    if any(isinstance(value[0], dict) and {"role", "from"} & value[0].keys() for value in lists.values()):
        return [record]  # it is itself a row, whose list holds messages
    of_rows = {key: value for key, value in lists.items() if all(isinstance(each, dict) for each in value)}
    if len(of_rows) > 1 and all(map(split_of, of_rows)):
        return [{**row, _SPLIT: key} for key, part in of_rows.items() for row in part]
    if len(of_rows) > 1:
        raise UserError(f"{file.path} is one JSON object with rows under {' and '.join(of_rows)}; keep one of them")
    if of_rows:
        return next(iter(of_rows.values()))
    if {"columns", "data"} <= lists.keys() and all(isinstance(row, list) for row in lists["data"]):
        return [dict(zip(map(str, lists["columns"]), row, strict=False)) for row in lists["data"]]
    if values and all(isinstance(value, dict) and value and value.keys() == values[0].keys() for value in values):
        keys = list(values[0])
        if all(key.isdecimal() for key in keys):
            return [{name: value[key] for name, value in record.items()} for key in keys]
        if len(values) > 1 or all(key.isdecimal() for key in record):
            return values
    if len(record) == len(lists) > 1 and len({len(value) for value in values}) == 1:
        return [dict(zip(record, row, strict=True)) for row in zip(*values, strict=True)]
    return [record]


def _not_json(file: FileRows, buffer: _Buffer, error: Exception) -> UserError:
    why = error.msg if isinstance(error, json.JSONDecodeError) else one_line(str(error), 100)
    return UserError(f"{file.path}, {buffer.position(error)}{why}); need one object a line, or one array")
