"""Readers of files: each goes through the rows of one, and notes what the file declares beside them.

JSON has an object a line, one array, objects over several lines, or one object that holds all rows:

{"question": "Which ward?", "answer": "Surgery."}
[{"question": "Which ward?", "answer": "Surgery."}, ...]
{"data": [{"question": "Which ward?", "answer": "Surgery."}, ...], "version": 2}
{"train": [{...}, ...], "test": [{...}, ...]}
{"question": {"0": "Which ward?", ...}, "answer": {"0": "Surgery.", ...}}        pandas, DataFrame.to_json
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count, islice
from typing import IO, Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llm_fed.basics.errors import UserError, install, one_line
from llm_fed.rows import BadRow, FileRows, Row, declared, formats
from llm_fed.rows.dialects import dialect_of
from llm_fed.rows.layout import split_of

_MOST_ROWS = 2**20  # of a sheet
_BATCH = 4096  # rows of a Parquet file that are in memory at once
Rows = Iterator[Row | BadRow]
CHECKED = 50  # first objects of a file whose keys are looked at for one that is there twice
_SPLIT = "split"  # the column that says the split of rows under a key of that name
_NEXT = re.compile(r"\s*(\S)")
_DECODER = json.JSONDecoder()
_ERRORS = (ValueError, RecursionError)  # also of numbers with thousands of digits, and of brackets without an end


class _Cells(NamedTuple):
    number: int  # of its first line, or of its row
    cells: Sequence[Any]
    lines: int = 1


def csv_rows(file: FileRows, encoding: str) -> Rows:
    """A header and a row per record. Blank lines, and lines of nothing but separators, are no rows. UserError where a
    quotation mark has no end, so that the rows behind it cannot be told apart."""
    text = formats.TextFile(file.path, encoding)
    dialect = dialect_of(text.head(), "\t" if ".tsv" in map(str.casefold, file.path.suffixes) else ",")
    file.remark(dialect.remark)
    records = _records(file, dialect.reader(islice(text.lines(), dialect.skipped, None)), dialect.skipped)
    header = next(records, None)
    if isinstance(header, BadRow):
        raise header
    if header is not None:
        yield from _with_header(file, [name.strip() for name in header.cells], records, "line")
    file.remark(text.remark)


def _records(file: FileRows, reader: Any, before: int) -> Iterator[_Cells | BadRow]:
    while True:
        start = before + reader.line_num + 1
        where = f"{file.path}, line {start}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise UserError(f"{where}: malformed CSV (a quotation mark that is opened here has no end)") from error
            yield BadRow(where, f"malformed CSV ({error})", before + reader.line_num + 1 - start)
            continue
        lines = before + reader.line_num + 1 - start
        if any(map(formats.damaged, cells)):
            yield BadRow(where, "bytes that are not UTF-8; write the line again", lines)
        elif any(cell and not cell.isspace() for cell in cells):
            yield _Cells(start, cells, lines)


def _with_header(file: FileRows, header: Sequence[str], records: Iterable[_Cells | BadRow], unit: str) -> Rows:
    """Each record as a row. Of columns with one name the first counts; `file.twice` knows them all."""
    file.note_names(header)
    indices = {name: index for index, name in reversed([*enumerate(header)]) if name}
    width = len(header)
    for record in records:
        if isinstance(record, BadRow):
            yield record
            continue
        cells, at = record.cells, f", {unit} {record.number}"
        if len(cells) < width or any(cell not in (None, "") for cell in cells[width:]):
            amount = "more" if len(cells) > width else "fewer"
            said = f"{amount} fields than in the header; quote texts that hold commas"
            yield BadRow(f"{file.path}{at}", said, record.lines)
            continue
        yield file.row(at, {name: cells[index] for name, index in reversed(indices.items())})


def parquet_rows(file: FileRows, encoding: str) -> Rows:
    """The rows of a Parquet file, some batches of which are in memory at once."""
    with _seekable(file) as source, pyarrow.parquet.ParquetFile(source) as table:
        yield from _of_arrow(file, table.schema_arrow, table.iter_batches(_BATCH))


def arrow_rows(file: FileRows, encoding: str) -> Rows:
    """The rows of an Arrow file, also as Feather and as `datasets` saves them."""
    with _seekable(file) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches: Any = (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = batches = pyarrow.ipc.open_stream(source)
        yield from _of_arrow(file, reader.schema, batches)


def _of_arrow(file: FileRows, schema: pyarrow.Schema, batches: Iterable[Any]) -> Rows:
    file.note_names(schema.names)
    file.features = {**file.features, **declared.of_schema(file, schema)}
    shown, number, allowance = declared.shown(file.path), count(1), formats.Allowance(file.path)
    for batch in batches:
        allowance.take(batch.nbytes)
        batch.validate(full=True)  # offsets and UTF-8, which damage would make wrong
        kept = batch.select(shown) if shown is not None else batch
        yield from (file.row(f", row {next(number)}", values) for values in kept.to_pylist())


def _seekable(file: FileRows) -> IO[bytes]:
    """A file that readers can jump about in; in memory where it is compressed."""
    with formats.opened(file.path) as data:
        is_plain = isinstance(data, io.BufferedReader) and isinstance(data.raw, io.FileIO)
        return open(file.path, "rb") if is_plain else io.BytesIO(data.read())


def xlsx_rows(file: FileRows, encoding: str) -> Rows:
    """The rows of an Excel workbook's first sheet that holds any; formulas as the values that Excel has saved."""
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(f"{file.path} is an Excel workbook, which needs openpyxl; {install('excel')}") from error
    with _seekable(file) as source:
        book = openpyxl.load_workbook(source, read_only=True, data_only=True)
        with_rows = [sheet for sheet in book.worksheets if any(_cells(sheet))]
        for sheet in with_rows[1:]:
            file.remark(f"without its sheet {sheet.title!r}")
        for sheet in with_rows[:1]:
            records = _cells(sheet)
            names = ["" if name is None else str(name).strip() for name in next(records).cells]
            yield from _with_header(file, names, (_padded(each, len(names)) for each in records), "row")
        book.close()


def _cells(sheet: Any) -> Iterator[_Cells]:
    """The rows of a sheet that hold anything."""
    for number, cells in enumerate(sheet.iter_rows(values_only=True), 1):
        if number > _MOST_ROWS:
            raise UserError(f"the sheet {sheet.title!r} has more than {_MOST_ROWS:,} rows, which no workbook can have")
        if any(cell is not None and str(cell).strip() for cell in cells):
            yield _Cells(number, cells)


def _padded(record: _Cells, width: int) -> _Cells:
    return record._replace(cells=(*record.cells, *[None] * (width - len(record.cells))))


def text_rows(file: FileRows, encoding: str) -> Rows:
    """A whole file as one text."""
    text = formats.TextFile(file.path, encoding)
    content = text.whole()
    file.remark(text.remark)
    if content.strip():
        yield file.row("", {"text": content.strip("\n\r")})


def json_rows(file: FileRows, encoding: str) -> Iterator[Row | BadRow]:
    """The rows of a file; UserError where it is malformed and no line can be left out alone."""
    text = formats.TextFile(file.path, encoding)
    lines = text.first_lines()
    first = lines[0].strip() if lines else ""
    if len(lines) > 1 and first != "{" and not first.startswith("[") and any(map(_is_object, lines)):
        yield from _lines(file, text)
    else:
        yield from _whole(file, text)
    file.remark(text.remark)


def _is_object(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
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
        yield _row(file, f", line {number}", record)


def _whole(file: FileRows, text: formats.TextFile) -> Iterator[Row | BadRow]:
    """Values one after another, or in one array."""
    values = _values(file, text.whole())
    start = [*islice(values, 2)]
    if len(start) == 1 and not start[0][1] and isinstance(record := start[0][2], dict):
        rows = _contained(record, file)
        is_row = rows == [record]
        at = [f"line {start[0][0]}"] if is_row else [f"item {i}" for i, _ in enumerate(rows, 1)]
        yield from (_row(file, f", {index}", each) for index, each in zip(at, rows, strict=True))
        return
    for line, _, value in chain(start, values):
        yield _row(file, f", line {line}", value)


def _row(file: FileRows, at: str, record: Any) -> Row | BadRow:
    if not isinstance(record, dict):
        said = f"an object with named columns is needed, got {one_line(json.dumps(record), 60)}"
        return BadRow(f"{file.path}{at}", said)
    return file.row(at, record)


def _values(file: FileRows, text: str) -> Iterator[tuple[int, bool, Any]]:
    """(line, whether it stands in an array, value) of each value."""
    index, line, number, in_array, ready = 0, 1, 0, False, True
    while match := _NEXT.match(text, index):
        start, sign = match.start(1), match[1]
        line += text.count("\n", index, start)
        index = start + 1
        if (sign == "[" and not in_array) or (sign == "]" and in_array) or (sign == "," and not (in_array and ready)):
            in_array, ready = (in_array if sign == "," else sign == "["), True
            continue
        if not ready:
            raise _not_json(file, line, start - text.rfind("\n", 0, start), "a comma is missing")
        number += 1
        decoder = json.JSONDecoder(object_pairs_hook=_noting(file)) if number <= CHECKED else _DECODER
        try:
            value, index = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            raise _not_json(file, error.lineno, error.colno, error.msg) from error
        except _ERRORS as error:
            raise _not_json(file, line, start - text.rfind("\n", 0, start), one_line(str(error), 100)) from error
        yield line, in_array, value
        line += text.count("\n", start, index)
        ready = not in_array
    if in_array:
        raise _not_json(file, line, len(text) - text.rfind("\n"), "the array has no end")


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
        beside = [key for key, value in record.items() if key not in of_rows and isinstance(value, list | dict)]
        file.remark(f"without what stands beside its rows ({', '.join(beside)})" if beside else "")
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


def _not_json(file: FileRows, line: int, column: int, why: str) -> UserError:
    said = f"line {line}: malformed JSON (column {column}: {why}); need one object a line, or one array"
    return UserError(f"{file.path}, {said}")


READERS: dict[str, Callable[[FileRows, str], Rows]] = {
    "csv": csv_rows, "json": json_rows, "parquet": parquet_rows, "arrow": arrow_rows, "xlsx": xlsx_rows,
    "txt": text_rows,
}  # fmt: skip
