"""Files that unpack to far more than they are: refused before the memory is taken, whatever packs them."""

import bz2
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.rows import formats, pictures
from llm_fed.settings.config import TaskConfig

LINE = b'{"instruction": "q", "output": "%s"}\n'


def _zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


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
    "train.jsonl.gz": lambda: gzip.compress(MUCH),
    "train.jsonl.bz2": lambda: bz2.compress(MUCH),
    "train.jsonl.xz": lambda: lzma.compress(MUCH),
    "train.jsonl.zst": lambda: _zstd(MUCH),
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
