"""Readers of files, one for each of `formats.KINDS`: it goes through the rows, and notes what the file declares.

A reader holds few rows at a time. Each record becomes a `source.row`, or a `BadRow` that says where (`FILE, line N`,
counted in the file, also where a library counts from what it was given), what is wrong, and what to do; of text, also
where bytes are `formats.damaged`.

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
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llm_fed.basics.documents import unique
from llm_fed.basics.errors import UserError, install, one_line
from llm_fed.rows import BadRow, Cell, Rows, Source, declared, formats
from llm_fed.rows.formats import NOTHING, SEPARATORS, DataFile
from llm_fed.rows.layout import split_of

if TYPE_CHECKING:
    from openpyxl.worksheet._read_only import ReadOnlyWorksheet

_MOST_ROWS = 2**20  # of a sheet
_BATCH = 4096  # rows of a Parquet file that are in memory at once
_SPLIT = "split"  # the column that says the split of rows under a key of that name
_NEXT = re.compile(r"\S")
_ERRORS = (ValueError, RecursionError)  # also of numbers with thousands of digits, and of brackets without an end
_NEED = "need one object a line, or one array"
# How cells are quoted where doubled quotation marks do not fit, and what is said of it.
_QUOTED: dict[str, dict[str, Any]] = {
    "with backslashes before quotation marks": {"doublequote": False, "escapechar": "\\"},
    "without quotation marks around texts": {"quoting": csv.QUOTE_NONE},
}
csv.field_size_limit(2**31 - 1)  # by default a cell may have 131,072 letters


class _Cells(NamedTuple):
    number: int  # of its first line, or of its row
    cells: Sequence[Cell]
    lines: int = 1


def csv_rows(source: Source, data: DataFile) -> Rows:
    """A header and a row per record. Blank lines, and lines of nothing but separators, are no rows. UserError where a
    quotation mark has no end, so that the rows behind it cannot be told apart."""
    skipped, options, remark = _dialect_of(data.head, "\t" if ".tsv" in data.path.name.casefold() else ",")
    source.remark(remark)
    records = _records(source, islice(data.lines(), skipped, None), options, skipped + 1)
    header = next(records, None)
    if isinstance(header, BadRow):
        raise header
    if header is not None:
        yield from _with_header(source, header.cells, records, "line")


def _dialect_of(head: str, usual: str) -> tuple[int, dict[str, Any], str]:
    """(lines before the header, options of csv.reader, what is special) of a table that begins with this text. The
    separator is the one that makes most columns of the first line, or what Excel says in a line `sep=;`. Lines of one
    column are parted by nothing, so that their texts may hold commas. Where doubled quotation marks do not fit the
    first lines, another way of quoting counts if it fits all of them. The `usual` separator needs no remark."""
    lines = list(io.StringIO(head, newline=""))
    skipped = next((index for index, line in enumerate(lines) if line.strip()), len(lines))
    first, separator = "".join(lines[skipped : skipped + 1]), ""
    if (given := first.strip("\r\n")).casefold().startswith("sep=") and len(given) == 5:
        separator, skipped = given[-1], skipped + 1
        first = "".join(lines[skipped : skipped + 1])
    separator = separator or formats.separator_of(first, usual)
    blanks = first.count(separator) > 0 and first.count(separator) == first.count(f"{separator} ")
    options = {"delimiter": separator, "skipinitialspace": blanks, "strict": True}
    named = "" if separator in (usual, ",", NOTHING) else f"with {SEPARATORS.get(separator, repr(separator))}"
    records = lines[skipped:]
    if '"' in head and not _fits(records, options):
        for remark, quoting in _QUOTED.items():
            other = options | quoting
            if "escapechar" in quoting and '\\"' not in head:
                continue
            if _fits(records, other) and ("escapechar" in quoting or _is_bare(records, other)):
                return skipped, other, ", ".join(filter(None, (named, remark)))
    return skipped, options, named


def _is_bare(lines: Sequence[str], options: dict[str, Any]) -> bool:
    """Whether cells that begin with a quotation mark mostly do not end with one."""
    cells = [cell.strip() for record in csv.reader(lines, **options) for cell in record]
    cells = [cell for cell in cells if cell.startswith('"')]
    return sum(len(cell) < 2 or not cell.endswith('"') for cell in cells) > len(cells) / 2


def _fits(lines: Sequence[str], options: dict[str, Any]) -> bool:
    """Whether all records have equally many cells, but for a last one that is cut off."""
    reader, widths = csv.reader(lines, **options), set[int]()
    while True:
        try:
            widths.add(len(next(reader)))
        except StopIteration:
            break
        except csv.Error as error:
            if "unexpected end of data" not in str(error):
                return False
    return len(widths - {0}) <= 1


def _records(source: Source, text: Iterable[str], options: dict[str, Any], first: int) -> Iterator[_Cells | BadRow]:
    """The records of a text whose lines are numbered from `first` on."""
    reader = csv.reader(text, **options)
    while True:
        start = first + reader.line_num
        where = f"{source.where}, line {start}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise UserError(f"{where}: malformed CSV (a quotation mark that is opened here has no end)") from error
            yield BadRow(where, f"malformed CSV ({error})", first + reader.line_num - start)
            continue
        lines = first + reader.line_num - start
        if any(map(formats.damaged, cells)):
            yield BadRow(where, "bytes that are not UTF-8; write the line again", lines)
        elif any(cell and not cell.isspace() for cell in cells):
            yield _Cells(start, cells, lines)


def _with_header(source: Source, header: Sequence[Cell], records: Iterable[_Cells | BadRow], unit: str) -> Rows:
    """Each record as a row. Of columns with one name the first counts; `source.twice` knows them all."""
    names = ["" if name is None else str(name).strip() for name in header]
    source.note_names(names)
    indices = {name: names.index(name) for name in names if name}
    width, nameless = len(names), [index for index, name in enumerate(names) if index and not name]  # 0: of pandas
    for record in records:
        if isinstance(record, BadRow):
            yield record
            continue
        cells, at = record.cells, f", {unit} {record.number}"
        if len(cells) < width or any(cell not in (None, "") for cell in cells[width:]):
            amount = "more" if len(cells) > width else "fewer"
            said = f"{amount} fields than in the header; quote texts that hold commas"
            yield BadRow(f"{source.where}{at}", said, record.lines)
            continue
        for index in nameless:
            source.remark(f"without column {index + 1}, which has no name" if cells[index] not in (None, "") else "")
        yield source.row(at, {name: cells[index] for name, index in indices.items()})


def parquet_rows(source: Source, data: DataFile) -> Rows:
    """The rows of a Parquet file, some batches of which are in memory at once."""
    with _seekable(data) as file, pyarrow.parquet.ParquetFile(file) as table:
        yield from _of_arrow(source, data, table.schema_arrow, table.iter_batches(_BATCH))


def arrow_rows(source: Source, data: DataFile) -> Rows:
    """The rows of an Arrow file, also as Feather and as `datasets` saves them."""
    with _seekable(data) as file:
        try:
            reader = pyarrow.ipc.open_file(file)
            batches: Iterable[pyarrow.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            file.seek(0)
            reader = batches = pyarrow.ipc.open_stream(file)
        yield from _of_arrow(source, data, reader.schema, batches)


def _of_arrow(source: Source, data: DataFile, schema: pyarrow.Schema, batches: Iterable[pyarrow.RecordBatch]) -> Rows:
    source.note_names(schema.names)
    source.features = {**source.features, **declared.of_schema(source, schema)}
    shown, number, allowance = declared.shown(data.path), count(1), formats.Allowance(data.path)
    for batch in batches:
        allowance.take(batch.nbytes)
        batch.validate(full=True)  # offsets and UTF-8, which damage would make wrong
        kept = batch.select(shown) if shown is not None else batch
        yield from (source.row(f", row {next(number)}", values) for values in kept.to_pylist())


def _seekable(data: DataFile) -> IO[bytes]:
    """A file that readers can jump about in; in memory where it is compressed."""
    with formats.opened(data.path) as file:
        is_plain = isinstance(file, io.BufferedReader) and isinstance(file.raw, io.FileIO)
        return open(data.path, "rb") if is_plain else io.BytesIO(file.read())


def xlsx_rows(source: Source, data: DataFile) -> Rows:
    """The rows of an Excel workbook's first sheet that holds any; formulas as the values that Excel has saved."""
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(f"{data.path} is an Excel workbook, which needs openpyxl; {install('excel')}") from error
    with _seekable(data) as file:
        book = openpyxl.load_workbook(file, read_only=True, data_only=True)
        first, *others = [sheet for sheet in book.worksheets if any(_cells(sheet))] or [None]
        for sheet in others:
            source.remark(f"without its sheet {sheet.title!r}")
        if first is not None:
            records = _cells(first)
            header = next(records).cells
            empty = (None,) * len(header)
            padded = (each._replace(cells=(*each.cells, *empty[len(each.cells) :])) for each in records)
            yield from _with_header(source, header, padded, "row")
        book.close()


def _cells(sheet: ReadOnlyWorksheet) -> Iterator[_Cells]:
    """The rows of a sheet that hold anything."""
    for number, cells in enumerate(sheet.iter_rows(values_only=True), 1):
        if number > _MOST_ROWS:
            raise UserError(f"the sheet {sheet.title!r} has more than {_MOST_ROWS:,} rows, which no workbook can have")
        if any(cell is not None and str(cell).strip() for cell in cells):
            yield _Cells(number, cells)


def txt_rows(source: Source, data: DataFile) -> Rows:
    """A whole file as one text."""
    content = "".join(data.lines())
    if content.strip():
        yield source.row("", {"text": content.strip("\n\r")})


def json_rows(source: Source, data: DataFile) -> Rows:
    """The rows of a file; UserError where it is malformed and no line can be left out alone."""
    lines = data.first_lines()
    first = lines[0].strip() if lines else ""
    if len(lines) > 1 and first != "{" and not first.startswith("[") and any(map(_is_object, lines)):
        yield from _lines(source, data)
        return
    values = _values(source, "".join(data.lines()))
    alone = values[0] if len(values) == 1 else None
    if isinstance(alone, list):
        values = alone
    elif isinstance(alone, dict):
        values = _contained(source, alone)
    source.single = values == [alone] and data.path.suffix.casefold() == ".json"  # a .jsonl may have a single row
    for number, record in enumerate(values, 1):
        yield source.row(", line 1" if record is alone else f", item {number}", record)


def _is_object(line: str) -> bool:
    try:
        return line.startswith("{") and isinstance(json.loads(line), dict)
    except _ERRORS:
        return False


def _lines(source: Source, data: DataFile) -> Rows:
    """Of one object a line no more than a line is in memory."""
    for number, line in enumerate(data.lines(), 1):
        if not line.strip():
            continue
        where = f"{source.where}, line {number}"
        if formats.damaged(line):
            yield BadRow(where, "bytes that are not UTF-8; write the line again")
            continue
        try:
            record = json.loads(line, object_pairs_hook=unique)
        except _ERRORS as error:
            at = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
            yield BadRow(where, f"malformed JSON ({one_line(at)}); {_NEED}")
            continue
        yield source.row(f", line {number}", record)


def _values(source: Source, text: str) -> list[Cell]:
    """The values that stand one after another in a text."""
    decoder, values, start, end = json.JSONDecoder(object_pairs_hook=unique), [], 0, 0
    try:
        while found := _NEXT.search(text, end):
            start = found.start()
            value, end = decoder.raw_decode(text, start)
            values.append(value)
    except _ERRORS as error:
        line, at = text.count("\n", 0, start) + 1, one_line(str(error), 100)
        if isinstance(error, json.JSONDecodeError):
            line, at = error.lineno, f"column {error.colno}: {error.msg}"
        raise UserError(f"{source.where}, line {line}: malformed JSON ({at}); {_NEED}") from error
    return values


def _contained(source: Source, record: dict[str, Any]) -> list[Cell]:
    """The rows that a whole file holds as one object; by default the object itself."""
    values = list(record.values())
    lists = {key: value for key, value in record.items() if isinstance(value, list) and value}
    if any(isinstance(value[0], dict) and {"role", "from"} & value[0].keys() for value in lists.values()):
        return [record]  # it is itself a row, whose list holds messages
    of_rows = {key: value for key, value in lists.items() if all(isinstance(each, dict) for each in value)}
    if len(of_rows) > 1 and all(map(split_of, of_rows)):
        return [{**row, _SPLIT: key} for key, part in of_rows.items() for row in part]
    if len(of_rows) > 1:
        raise UserError(f"{source.where} is one JSON object with rows under {' and '.join(of_rows)}; keep one of them")
    if of_rows:
        beside = [key for key, value in record.items() if key not in of_rows and isinstance(value, list | dict)]
        source.remark(f"without what stands beside its rows ({', '.join(beside)})" if beside else "")
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
