"""Federations that are known, written as files of a random form, and read again.

A form is a layout, a format, an encoding, a separator, line ends, a compression, names of columns, the letters of
suffixes, the normal form of names, shards, and files and columns that mean nothing. What is read must be what was
written, and what is said of it must be what is special about the form. With one bad row more the file must be named,
and the row alone be left out.
"""

import bz2
import csv
import gzip
import importlib.util
import io
import json
import lzma
import random
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks import files
from llm_fed.tasks.common import Example, TaskData, Turn

CLIENTS = (
    "north", "South West", "_malmo", "Zürich", "Łódź", "2023", "11", "client10", "client2", "a.b", "北京", "dev-team",
)  # fmt: skip
TEXTS = (
    "Which ward?", "A burn, of the third degree.", 'He said "no".', "a;b|c", "tab\there", "two\nlines", "1.0", "007",
    "é", "Müller übt täglich", "Où est l'hôpital?", "  blank around  ", "北京在哪里？", "Łódź", "{x: 1}", "[1, 2]",
    "null", "x" * 300, "it's", "\\n", "<s>", "-", "#", "0", "true", "ω≤∞", "NA",
)  # fmt: skip
NAMES = {  # usual names of columns
    "prompt": ("instruction", "prompt", "question", "Question", "INPUTS"),
    "answer": ("output", "response", "Answer", "completion", "target"),
    "client": ("client", "client_id", "Client"), "system": ("system", "system_prompt"), "input": ("context",),
}  # fmt: skip
SPLITS = {"train": ("train", "TRAIN", "training"), "validation": ("validation", "val", "dev"), "test": ("test", "Test")}
KINDS = (
    "jsonl", "ndjson", "array", "pretty", "objects", "key", "columns", "by number", "csv", "tsv", "parquet", "arrow",
    "xlsx",
)  # fmt: skip
EXCEL = importlib.util.find_spec("openpyxl") is not None
JUNK = (".DS_Store", "Thumbs.db", "._x.jsonl", ".gitattributes", "__MACOSX/._north.jsonl")
OTHER = ("README.md", "LICENSE", "notes.docx", "make.py", ".hidden.jsonl")  # of these is said that they are not used
BY_COLUMN = ("one file", "split files", "hub", "parquet branch", "years", "spark")  # a column names the client
LAYOUTS = (*BY_COLUMN, "files", "folders", "split folders", "client shards", "numbered", "one folder")
BAD = {"answer": ""}  # laid over a row, it cannot be used


@dataclass(frozen=True)
class Form:
    """How a federation is written."""

    layout: str
    kinds: tuple[str, ...]  # of files, one after another
    encoding: str
    separator: str
    ends: str
    blank: bool  # lines between rows
    compression: str
    upper: bool  # letters of suffixes
    decomposed: bool  # names of files
    shards: int
    columns: dict[str, str]
    source: bool  # a column that means nothing
    other: tuple[str, ...]  # files beside the data


@dataclass
class Federation:
    """Clients with their rows by split, as Examples and as what is written of them."""

    rows: dict[str, dict[str, list[dict[str, Any]]]]
    style: str  # pairs, talk or text
    with_system: bool


@dataclass
class Written:
    """A folder with files, and what is to be said of it."""

    path: Path
    columns: ColumnsConfig
    expected: dict[str, dict[str, list[Example]]]
    lines: set[str] = field(default_factory=set)  # labels of `Reading.for_people`
    bad: str = ""  # the file with the bad row


def federation(draw: random.Random) -> Federation:
    style = draw.choice(("pairs", "pairs", "pairs", "talk", "text"))
    names = draw.sample(CLIENTS, draw.randint(1, 4))
    splits = ["train", *(["test"] if draw.random() < 0.6 else []), *(["validation"] if draw.random() < 0.3 else [])]
    with_system = style == "pairs" and draw.random() < 0.3

    def row() -> dict[str, Any]:
        found = {"prompt": draw.choice(TEXTS), "answer": draw.choice(TEXTS)}
        return found | ({"system": draw.choice(("", *TEXTS[:3]))} if with_system else {})

    rows = {name: {split: [row() for _ in range(draw.randint(4, 8))] for split in splits} for name in names}
    return Federation(rows, style, with_system)


def form(draw: random.Random, federation: Federation) -> Form:
    layout = draw.choice(LAYOUTS)
    several = len(federation.rows) > 1
    if layout == "one folder" and not several:
        layout = "folders"  # a folder that is alone is taken for one around all
    kinds = [kind for kind in KINDS if kind != "xlsx" or EXCEL]
    return Form(
        layout=layout,
        kinds=tuple(draw.choices(kinds, k=draw.choice((1, 1, 3)))),
        encoding=draw.choice(("utf-8", "utf-8", "utf-8-sig", "cp1252", "utf-16", "utf-16-le")),
        separator=draw.choice(",,;\t|"),
        ends=draw.choice(("\n", "\n", "\r\n", "\r")),
        blank=draw.random() < 0.2,
        compression=draw.choice(("", "", "", ".gz", ".bz2", ".xz", ".zst")),
        upper=draw.random() < 0.2,
        decomposed=draw.random() < 0.3,
        shards=draw.randint(1, 3),
        columns={role: draw.choice(names) for role, names in NAMES.items()},
        source=draw.random() < 0.2,
        other=tuple(draw.sample((*JUNK, *OTHER), draw.choice((0, 0, 1, 2)))),
    )


def write(federation: Federation, form: Form, folder: Path, draw: random.Random, bad: bool = False) -> Written:
    """Write the federation in this form."""
    by_column = form.layout in BY_COLUMN
    written = Written(folder, ColumnsConfig(), {})
    pieces = list(_pieces(federation, form))
    spoilt = draw.randrange(len(pieces)) if bad else -1
    for number, (stem, rows) in enumerate(pieces):
        kind = form.kinds[number % len(form.kinds)]
        if number == spoilt:
            rows = [*rows[:-1], (rows[-1][0], rows[-1][1] | BAD), rows[-1]]
        written.lines |= _file(federation, form, folder, stem, kind, rows, by_column)
        written.bad = stem if number == spoilt else written.bad
    for name in form.other:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"question": "no", "answer": "no"}\n')
    if {*form.other} & {*OTHER}:
        written.lines.add("not used")
    if form.layout == "years":
        written.columns = ColumnsConfig(client=form.columns["client"])
    if form.layout == "one file":
        written.path = next(path for path in folder.iterdir() if path.name.lower().startswith("everything"))
        written.lines.discard("not used")
        written.lines |= {"not used"} if form.source else set()
    for client, splits in federation.rows.items():
        written.expected[client] = {
            split: [_example(federation, row, client) for row in splits.get(split, [])] for split in SPLITS
        }
    return written


def _pieces(federation: Federation, form: Form) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """(path without suffix, rows with their clients) of each file."""
    draw = random.Random(repr(form))
    words = {split: draw.choice(names) for split, names in SPLITS.items()}
    splits = list(next(iter(federation.rows.values())))
    joiner, front = draw.choice("-_."), draw.random() < 0.2 and len(splits) > 1
    front = front and not all(map(str.isdecimal, federation.rows))  # train-11 alone may be the eleventh shard
    pooled = {split: [(c, row) for c, parts in federation.rows.items() for row in parts[split]] for split in splits}
    if form.layout in ("one file", "years", "spark") and len(splits) > 1:
        pooled = {"": [(c, row | {"split": split}) for split, rows in pooled.items() for c, row in rows]}
    for split, rows in pooled.items():
        if form.layout == "one file":
            yield "everything", rows
        elif form.layout == "years":
            yield from ((f"{2020 + i}", part) for i, part in enumerate(_cut(rows, form.shards)))
        elif form.layout == "spark":
            yield from ((f"part-{i:05}-3b7f09-c000.snappy", part) for i, part in enumerate(_cut(rows, form.shards)))
        elif form.layout == "split files":
            yield words[split], rows
        elif form.layout == "hub":
            yield from _shards(f"{split}", rows, form.shards)
        elif form.layout == "parquet branch":
            yield from ((f"default/{split}/{i:04}", part) for i, part in enumerate(_cut(rows, form.shards)))
    own = {} if form.layout in BY_COLUMN else federation.rows
    for client, split in ((client, split) for client in own for split in splits):
        rows = [(client, row) for row in own[client][split]]
        if form.layout == "files":
            plain_name = len(splits) == 1 and client != "dev-team"
            name = f"{words[split]}{joiner}{client}" if front else f"{client}{joiner}{words[split]}"
            yield client if plain_name else name, rows
        elif form.layout == "folders":
            yield from _shards(f"{client}/{words[split]}", rows, form.shards, draw.random() < 0.5)
        elif form.layout == "numbered":
            parts = _cut(rows, form.shards)
            yield from ((f"{client}-{split}{i if len(parts) > 1 else ''}", part) for i, part in enumerate(parts, 1))
        elif form.layout == "one folder":
            word = f"{words[split]}/" if len(splits) > 1 else ""
            yield from ((f"{client}/{word}{2020 + i}", part) for i, part in enumerate(_cut(rows, form.shards)))
        elif form.layout == "split folders":
            yield f"{words[split]}/{client if client not in ('2023', '11') else f'nr {client}'}", rows
        else:
            yield from _shards(f"{client}-{split}", rows, form.shards)


def _cut(rows: list[Any], count: int) -> list[list[Any]]:
    size = -(-len(rows) // count)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _shards(stem: str, rows: list[Any], count: int, plain: bool = False) -> Iterator[tuple[str, list[Any]]]:
    parts = _cut(rows, count)
    if plain and len(parts) == 1:
        return iter([(stem, rows)])
    return ((f"{stem}-{number:05}-of-{len(parts):05}", part) for number, part in enumerate(parts))


def _example(federation: Federation, row: dict[str, Any], client: str) -> Example:
    turns = [Turn("system", row["system"])] if row.get("system") else []
    asked: Any = "" if federation.style == "text" else row["prompt"]
    if turns or federation.style == "talk":
        asked = (*turns, Turn("user", row["prompt"]))
    return Example(asked, (row["answer"],), (), client)


def _values(federation: Federation, form: Form, client: str, row: dict[str, Any], by_column: bool) -> dict[str, Any]:
    """A row as its columns, in a fixed order."""
    names = form.columns
    turns = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]
    pair = {names["prompt"]: row["prompt"], names["answer"]: row["answer"]}
    found = {"text": {"text": row["answer"]}, "talk": {"messages": turns}, "pairs": pair}[federation.style]
    found |= {names["system"]: row["system"]} if "system" in row else {}
    found |= {names["client"]: client} if by_column else {}
    found |= {"split": row["split"]} if "split" in row else {}
    return found | ({"source": "x"} if form.source else {})


def _file(
    federation: Federation, form: Form, folder: Path, stem: str, kind: str, rows: list[Any], by_column: bool
) -> set[str]:
    """Write one file; the labels of what is to be said of it."""
    values = [_values(federation, form, client, row, by_column) for client, row in rows]
    is_table, is_text = kind in ("csv", "tsv"), kind not in ("parquet", "arrow", "xlsx")
    said = {"not used"} if form.source else set()
    if is_table:
        separator = "\t" if kind == "tsv" else form.separator
        text = _csv(values, separator, form)
        said |= {"read"} if separator != "," and kind != "tsv" and len(values[0]) > 1 else set()
    elif is_text:
        text = _json(values, kind, form)
    if is_text:
        data, told = _encoded(text, form.encoding)
        said |= {"read"} if told else set()
    else:
        data = {"parquet": _parquet, "arrow": _arrow, "xlsx": _xlsx}[kind](values)
    suffix = f".{kind}" if kind in ("jsonl", "ndjson", "csv", "tsv", "parquet", "arrow", "xlsx") else ".json"
    compression = form.compression if is_text else ""
    suffix += compression
    name = unicodedata.normalize("NFD", stem) if form.decomposed else stem
    path = folder / f"{name}{suffix.upper() if form.upper else suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compressed(data, compression))
    return said


def _csv(values: list[dict[str, Any]], separator: str, form: Form) -> str:
    target = io.StringIO()
    # Python's writer leaves other line ends than its own without quotation marks.
    quoting = csv.QUOTE_MINIMAL if form.ends == "\n" else csv.QUOTE_NONNUMERIC
    writer = csv.writer(target, delimiter=separator, lineterminator=form.ends, quoting=quoting)
    writer.writerow(values[0])
    for row in values:
        writer.writerow([json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for v in row.values()])
        if form.blank:
            target.write(form.ends)
    return target.getvalue()


def _json(values: list[dict[str, Any]], kind: str, form: Form) -> str:
    if kind == "objects":
        return "\n".join(json.dumps(row, indent=1, ensure_ascii=False) for row in values)
    trees: dict[str, Any] = {
        "array": values, "pretty": values, "key": {"version": 1, "rows": values},
        "columns": {name: {str(i): row[name] for i, row in enumerate(values)} for name in values[0]},
        "by number": {str(i): row for i, row in enumerate(values)},
    }  # fmt: skip
    if kind in trees:
        text = json.dumps(trees[kind], indent=2 if kind == "pretty" else None, ensure_ascii=kind == "columns")
        return text.replace("\n", form.ends) if kind == "pretty" else text
    end = form.ends * (2 if form.blank else 1)
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in values)


def _encoded(text: str, encoding: str) -> tuple[bytes, bool]:
    """The text's bytes, and whether it must be said how they were read; what an encoding lacks is written in UTF-8."""
    if encoding == "cp1252":
        try:
            return text.encode("cp1252"), not text.isascii()
        except UnicodeEncodeError:
            return text.encode(), False
    return text.encode(encoding), encoding.startswith("utf-16")


def _parquet(values: list[dict[str, Any]]) -> bytes:
    target = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), target)
    return target.getvalue()


def _arrow(values: list[dict[str, Any]]) -> bytes:
    table, target = pyarrow.Table.from_pylist(values), io.BytesIO()
    with pyarrow.ipc.new_stream(target, table.schema) as writer:
        writer.write_table(table)
    return target.getvalue()


def _xlsx(values: list[dict[str, Any]]) -> bytes:
    import openpyxl

    book, target = openpyxl.Workbook(), io.BytesIO()
    book.active.append([*values[0]])
    for row in values:
        book.active.append([json.dumps(v, ensure_ascii=False) if isinstance(v, list) else v for v in row.values()])
    book.save(target)
    return target.getvalue()


def compressed(data: bytes, ending: str) -> bytes:
    if ending == ".zst":
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as file:
            file.write(data)
        return sink.getvalue().to_pybytes()
    return {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[ending](data)


def read(written: Written, **settings: Any) -> TaskData:
    return files.load(TaskConfig("files", str(written.path), columns=written.columns, **settings), 0)


def check(written: Written, data: TaskData) -> None:
    """Compare what was read with what was written."""
    found = {id: {split: list(getattr(client, split)) for split in SPLITS} for id, client in data.clients.items()}
    meant = {client.removeprefix("nr "): parts for client, parts in written.expected.items()}
    found = {id.removeprefix("nr "): parts for id, parts in found.items()}
    for parts in (*meant.values(), *found.values()):
        for split, rows in parts.items():
            parts[split] = sorted((replace(row, group="") for row in rows), key=repr)
    assert found == meant, (found, meant)
    assert data.reading is not None
    said = data.reading.for_people()
    assert said.keys() == written.lines, (said, written.lines)


def attempt(draw: random.Random, folder: Path) -> None:
    """One federation in one form, without and with a bad row.

    Raises:
        AssertionError, UserError: it was misread, refused, or said what it should not.
    """
    given = federation(draw)
    how = form(draw, given)
    written = write(given, how, folder / "form", draw)
    check(written, read(written))
    if given.style == "text":
        return  # in a table of one column a bad row is a blank line
    written = write(given, how, folder / "bad", draw, bad=True)
    try:
        read(written)
    except UserError as refused:
        assert unicodedata.normalize("NFC", written.bad) in unicodedata.normalize("NFC", str(refused)), refused
    else:
        raise AssertionError("a bad row was taken")
    written.lines.add("left out")
    if sum(len(part) for parts in given.rows.values() for part in parts.values()) >= 20:
        check(written, read(written, bad_rows="skip"))
