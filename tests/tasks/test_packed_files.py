"""Files of strangers: whatever they hold, they are read, or refused in one line, before they take memory."""

import io
import json
import zipfile
from pathlib import Path

import any_form
import every
import fuzz
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.rows import formats, pictures
from llm_fed.settings.config import TaskConfig

LINE = b'{"instruction": "q", "output": "%s"}\n'


def _zip(name: str, data: bytes) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return sink.getvalue()


def _table(write) -> bytes:
    sink = io.BytesIO()
    column = pyarrow.array(["x" * 1_000] * 20_000)
    write(pyarrow.table({"instruction": column, "output": column}), sink)
    return sink.getvalue()


def _arrow(table: pyarrow.Table, sink: io.BytesIO) -> None:
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)


MUCH = LINE % (b"x" * 10_000_000)
PACKED = {
    "train.jsonl.gz": lambda: any_form.compressed(MUCH, ".gz"),
    "train.jsonl.bz2": lambda: any_form.compressed(MUCH, ".bz2"),
    "train.jsonl.xz": lambda: any_form.compressed(MUCH, ".xz"),
    "train.jsonl.zst": lambda: any_form.compressed(MUCH, ".zst"),
    "train.xlsx": lambda: _zip("xl/workbook.xml", b"x" * 10_000_000),
    "train.parquet": lambda: _table(pyarrow.parquet.write_table),
    "train.arrow": lambda: _table(_arrow),
}


@pytest.mark.parametrize("name", PACKED)
def test_what_unpacks_to_far_too_much_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.setattr(formats, "FREE", 10**5)
    (tmp_path / name).write_bytes(PACKED[name]())
    with pytest.raises(UserError, match="unpacks to more than 100 times its size"):
        tasks.load(TaskConfig(name="files", path=str(tmp_path / name)), 0)


def test_pictures_in_an_npz_file(tmp_path, monkeypatch):
    path: Path = tmp_path / "pictures.npz"
    np.savez_compressed(path, x=np.zeros((3_000, 28, 28), np.uint8), y=np.zeros(3_000, np.int64))
    monkeypatch.setattr(formats, "FREE", 10**5)
    with pytest.raises(UserError, match="unpacks to more than 100 times its size"):
        pictures.read_npz(path)


# Whatever they hold


ONCE_FELL = {  # all were tracebacks
    "brackets in an array": ("train.json", "[" * 100_000 + "]" * 100_000, "malformed JSON"),
    "brackets in a line": (
        "train.jsonl",
        '{"output": "x", "instruction": ' + "[" * 100_000 + "\n",
        "line 1: malformed",
    ),
    "5,000 digits": ("train.jsonl", '{"output": "x", "instruction": ' + "9" * 5000 + "}\n", "line 1: malformed"),
    "a client of 5,000 digits": (
        "train.jsonl",
        "".join(json.dumps({"instruction": "q", "output": "x", "client": "9" * 5000}) + "\n" for _ in range(9)),
        "has 5000 bytes, too many",
    ),
    "a zip archive that asks for version 12.7 of its readers": (
        "train.xlsx",
        f"PK\3\4{chr(0) * 26}PK\1\2\24\3\177{chr(0) * 39}PK\5\6{chr(0) * 4}\1\0\1\0.\0\0\0\36{chr(0) * 5}",
        "zip file version 12.7",
    ),
}


@pytest.mark.parametrize("what", ONCE_FELL)
def test_what_once_was_a_traceback_is_one_line(tmp_path, what):
    name, text, message = ONCE_FELL[what]
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as refused:
        tasks.load(TaskConfig(name="files", path=str(tmp_path)), 0)
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 500


def test_what_is_neither_a_file_nor_a_folder():
    with pytest.raises(UserError, match="neither a file nor a folder"):
        tasks.load(TaskConfig(name="files", path="/dev/null"), 0)


def test_files_of_any_kind_are_read_or_refused(tmp_path):
    """JSON, JSONL, CSV, Parquet and npz, changed."""
    kind = fuzz.DataFiles(tmp_path)
    every.passes(range(120), lambda number: fuzz.tried(kind, number))


@pytest.mark.slow
def test_many_files_are_read_or_refused(tmp_path):
    kind = fuzz.DataFiles(tmp_path)
    every.passes(range(30), lambda number: fuzz.tried(kind, f"warm {number}"))  # so that all is loaded
    with every.bounded_memory():
        every.passes(range(10_000), lambda number: fuzz.tried(kind, f"many {number}"))
