"""What a file is, by its name and its first bytes, and the text in it: compression, encoding, separators."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from shlex import quote
from typing import IO, Any, NamedTuple

from llm_fed.basics.errors import UserError
from llm_fed.rows.encodings import NAMES, encoding_of


class FileKind(NamedTuple):
    """A kind of file; the function `KIND_rows` of `readers` reads it."""

    names: str  # in messages
    suffixes: tuple[str, ...]
    by_library: bool = False  # whether its reader opens the bytes itself: no encoding is sought, and any error is told
    magic: bytes = b""  # with which each file of this kind begins, whatever its name


KINDS = {
    "json": FileKind("JSONL, JSON", (".jsonl", ".ndjson", ".jsonlines", ".json")),
    "csv": FileKind("CSV, TSV", (".csv", ".tsv")),
    "parquet": FileKind("Parquet", (".parquet", ".pq"), by_library=True, magic=b"PAR1"),
    "arrow": FileKind("Arrow", (".arrow", ".feather"), by_library=True, magic=b"ARROW1"),
    "xlsx": FileKind("XLSX", (".xlsx", ".xlsm"), by_library=True, magic=b"PK\x03\x04"),
    "txt": FileKind("TXT", (".txt",)),
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
RATIO, FREE, MOST = 100, 2**26, 2**36  # of packed files, see `Allowance`
_PACKED: dict[bytes, Callable[[Path], io.BufferedIOBase]] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
HEAD = 4096  # bytes that are looked at
NO_TEXT = {  # what no table can be read from
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "save it as .xlsx or as CSV"),
    b"version https://git-lfs": ("a pointer of Git LFS in the data's place", "give git lfs pull in its repository"),
    b"<!doctype html": ("a web page", "download the data itself"),
    b"<html": ("a web page", "download the data itself"),
    b"%pdf-": ("a PDF", "give its text as JSONL, CSV or TXT"),
}
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
NOTHING = "\x1f"  # separates the cells of one column; no text has it
SAMPLE = 1 << 18  # bytes in lines that are not ASCII, by which an encoding is told
LONGEST = 1 << 24  # letters of a first line that are looked at
_WORD = re.compile(r"\w*[^\W\x00-\x7f]\w*")
_DAMAGED = re.compile("[\udc80-\udcff]")


def unreadable() -> tuple[type[Exception], ...]:
    """What reading a damaged file raises."""
    import pyarrow

    archives = zipfile.BadZipFile, NotImplementedError  # the latter of a later version
    return OSError, EOFError, MemoryError, zlib.error, lzma.LZMAError, pyarrow.ArrowException, *archives


def supported() -> str:
    """The kinds of files, for messages."""
    *names, last = ", ".join(kind.names for kind in KINDS.values()).split(", ")
    return f"{', '.join(names)} or {last}, also compressed as .gz, .bz2, .xz or .zst"


def kind_of(name: str) -> str | None:
    """What a file should hold (a key of KINDS), by the end of its name in any case; None: nothing that is read."""
    suffix = parts_of(name)[1]
    return next((key for key, kind in KINDS.items() if suffix in kind.suffixes), None)


def parts_of(name: str) -> tuple[str, str]:
    """A file's name without its folders, suffix and compression, and the suffix."""
    stem = name.rpartition("/")[2]
    ending = next((ending for ending in COMPRESSED if stem.casefold().endswith(ending)), "")
    stem = stem[: len(stem) - len(ending)]
    before, dot, suffix = stem.rpartition(".")
    return (before, f".{suffix.casefold()}") if dot and before else (stem, "")


class Allowance:
    """What a packed file may still unpack to: RATIO times its own size beside FREE bytes, and MOST in all."""

    def __init__(self, path: Path):
        self._path = path
        self._left = min(MOST, FREE + RATIO * path.stat().st_size)

    def take(self, size: int) -> None:
        """Count so many unpacked bytes; UserError where there are too many."""
        self._left -= size
        if self._left < 0:
            raise UserError(
                f"{self._path} unpacks to more than {RATIO} times its size, or than {MOST >> 30} GiB, as no ordinary "
                "data do; unpack it yourself if you know what it holds"
            )


class _Unpacked(io.RawIOBase):
    """A stream of unpacked bytes, as far as they are allowed."""

    def __init__(self, path: Path, stream: io.BufferedIOBase):
        self._stream, self._allowance = stream, Allowance(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._allowance.take(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file as they were before it was compressed, whatever its name says."""
    with open(path, "rb") as file:
        head = file.read(6)
    stream = next((kind(path) for magic, kind in _PACKED.items() if head.startswith(magic)), None)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(_Unpacked(path, stream)) if stream else open(path, "rb")


def check_archive(path: Path, archive: zipfile.ZipFile) -> None:
    """UserError where what lies in an archive is too large once unpacked; of each member no more than it says is."""
    Allowance(path).take(sum(member.file_size for member in archive.infolist()))


class DataFile:
    """A file by its first bytes, and the text in it. What is no UTF-8 is read as the encoding that its letters show
    (`encodings.encoding_of`). In a file that is mostly UTF-8 such bytes are damage: they stay, as lone surrogates.
    UserError where nothing can be read: what it is, and what to do. `kind`: what it holds, a key of KINDS. `remark`:
    which encoding it is in, if that had to be found out; after its lines were read."""

    def __init__(self, path: Path):
        self.path, self.remark, self._encoding = path, "", "utf-8-sig"
        with opened(path) as file:
            head = file.read(HEAD)
        kind = _packed_kind(path, head) or kind_of(path.name)
        if kind is None:
            raise UserError(f"{path} cannot be read; supported are {supported()}")
        self.kind = kind
        if KINDS[kind].by_library and head:
            return
        if (encoding := _wide_encoding(path, head)) is not None:
            self._encoding, self.remark = encoding, f"as {encoding[:6].upper()}"
        first = next(iter(self.first_lines()), "") if kind in ("json", "csv") else ""
        if is_json(first):
            self.kind = "json"
        elif kind == "json" and separator_of(first, ",") != NOTHING:
            self.kind = "csv"

    def lines(self) -> Iterator[str]:
        """Its lines, with their ends."""
        wide = self._encoding != "utf-8-sig"
        other, is_unicode = None, wide
        try:
            errors = "strict" if wide else "surrogateescape"
            with io.TextIOWrapper(opened(self.path), self._encoding, errors, newline="") as file:
                for line in file:
                    if not (is_unicode or other or line.isascii()):
                        other = self._other() if damaged(line) else None
                        is_unicode = other is None
                    yield other.decode(line.encode("utf-8", "surrogateescape")) if other else line
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UserError(f"{self.path} begins {self.remark}, but has a byte (0x{byte:02x}) that is none") from error

    @cached_property
    def head(self) -> str:
        """Its beginning, up to the end of a line; two lines at least, of up to LONGEST letters."""
        with io.TextIOWrapper(opened(self.path), self._encoding, "replace", newline="") as file:
            return "".join([file.read(HEAD), file.readline(LONGEST), file.readline(LONGEST)])

    def first_lines(self) -> list[str]:
        """The lines of its head, without blank ones and without their ends."""
        return [line for line in re.split(r"\r\n|\r|\n", self.head) if line.strip()]

    def _other(self) -> codecs.IncrementalDecoder | None:
        """A decoder for a file with bytes that are no UTF-8; None where most of it is UTF-8."""
        good, size, bad = 0, 0, []
        with opened(self.path) as file:
            for line in file:
                if line.isascii():
                    continue
                try:
                    line.decode()
                    good += 1
                except UnicodeDecodeError:
                    bad.append(line)
                size += len(line)
                if size > SAMPLE:
                    break
        if good >= len(bad):
            return None
        sample = b"".join(bad)
        if (codec := encoding_of(sample)) is None:
            raise UserError(
                f"{self.path} is not text in UTF-8, and its letters do not tell what it is; convert it, e.g. if it is "
                f"Windows-1256: iconv -f WINDOWS-1256 -t UTF-8 {quote(str(self.path))} > NEW{self.path.suffix}"
            )
        word = _WORD.search(sample.decode(codec, "replace"))
        self.remark = f"as {NAMES[codec]}" + (f" (e.g. {word[0][:30]})" if word else "")
        return codecs.getincrementaldecoder(codec)()


def _packed_kind(path: Path, head: bytes) -> str | None:
    """What a file holds that is no text; None of others. UserError for what no rows can be read from."""
    for magic, (what, advice) in NO_TEXT.items():
        if head.lower().startswith(magic):
            raise UserError(f"{path} is {what}; {advice}")
    kind = next((key for key, kind in KINDS.items() if kind.magic and head.startswith(kind.magic)), None)
    if kind == "xlsx":
        with opened(path) as file, zipfile.ZipFile(io.BytesIO(file.read())) as archive:
            check_archive(path, archive)
            if "xl/workbook.xml" not in archive.namelist():
                raise UserError(f"{path} is a zip archive; unpack it")
    return kind


def _wide_encoding(path: Path, head: bytes) -> str | None:
    """UTF-16 or UTF-32, by its mark or by where its zeros are; None: neither."""
    marked = next((name for mark, name in _MARKS.items() if head.startswith(mark)), None)
    if marked or b"\0" not in head:
        return marked
    zeros = [head[index::2].count(0) / max(1, len(head[index::2])) for index in (0, 1)]
    if max(zeros) < 0.01 or min(zeros) > max(zeros) / 4:
        raise UserError(f"{path} holds bytes that are no text; write it again as JSONL in UTF-8")
    return "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"


def damaged(text: str) -> bool:
    """Whether a text holds bytes that could not be decoded."""
    return not text.isascii() and _DAMAGED.search(text) is not None


def separator_of(header: str, usual: str) -> str:
    """What makes most columns of a table's first line, of equally many the `usual`; NOTHING for one column."""
    counts = {}
    for candidate in SEPARATORS:
        try:
            counts[candidate] = len(next(csv.reader([header], delimiter=candidate), []))
        except csv.Error:
            counts[candidate] = 0
    best = max(SEPARATORS, key=lambda each: (counts[each], each == usual))
    return best if counts[best] > 1 else NOTHING


def is_json(line: str) -> bool:
    """Whether a line begins a file of JSON: an object, an array, or the bracket that opens one."""
    text = line.strip()
    if text in ("{", "[") or text.startswith(("[{", "[ {")) or re.match(r'\{\s*"[^"]*"\s*:', text):
        return True
    try:
        return text.startswith(("{", "[")) and isinstance(json.loads(text), dict | list)
    except (ValueError, RecursionError):
        return False
