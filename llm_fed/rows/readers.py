"""Readers of files: each goes through the rows of one, and notes what the file declares beside them."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from typing import IO, Any, NamedTuple

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llm_fed.basics.errors import UserError, install
from llm_fed.rows import BadRow, FileRows, Row, declared, formats
from llm_fed.rows.dialects import dialect_of
from llm_fed.rows.jsonrows import json_rows

_MOST_ROWS = 2**20  # of a sheet
_BATCH = 4096  # rows of a Parquet file that are in memory at once
Rows = Iterator[Row | BadRow]


class _Cells(NamedTuple):
    number: int  # of its first line, or of its row
    cells: Sequence[Any]
    lines: int = 1


def csv_rows(file: FileRows, encoding: str) -> Rows:
    """A header and a row per record. Blank lines, and lines of nothing but separators, are no rows. UserError where a
    quotation mark has no end, so that the rows behind it cannot be told apart."""
    text = formats.TextFile(file.path, encoding)
    dialect = dialect_of(text.head(), "\t" if formats.suffix_of(file.path.name) == ".tsv" else ",")
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
    places = {name: place for place, name in reversed([*enumerate(header)]) if name}
    nameless = [place for place, name in enumerate(header) if not name and place]  # the first is an index of pandas
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
        file.nameless.update(f"column {place + 1}" for place in nameless if cells[place] not in (None, ""))
        yield file.row(at, {name: cells[place] for name, place in reversed(places.items())})


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


READERS: dict[str, Callable[[FileRows, str], Rows]] = {
    "csv": csv_rows, "json": json_rows, "parquet": parquet_rows, "arrow": arrow_rows, "xlsx": xlsx_rows,
    "txt": text_rows,
}  # fmt: skip
