"""What a file of text is, where it is not what its name says: named in an error, with how to convert it."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from shlex import quote

from llm_fed.errors import UserError

HEAD = 4096  # bytes that are looked at
MAGIC = {
    b"PK\x03\x04": ("a zip archive or an Excel workbook", "save its table as CSV with commas, in UTF-8"),
    b"\xd0\xcf\x11\xe0": ("an old Excel workbook", "save its table as CSV with commas, in UTF-8"),
    b"PAR1": ("a Parquet file", "give it a name that ends in .parquet"),
    b"\x1f\x8b": ("compressed by gzip", "give it a name that ends in .gz"),
    b"version https://git-lfs": (
        "a pointer of Git LFS in the place of the data",
        "give git lfs pull in its repository",
    ),
    b"<!doctype html": ("a web page", "download the data itself"),
    b"<html": ("a web page", "download the data itself"),
}
SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}


def check_bytes(path: Path, head: bytes) -> None:
    """Refuse a file whose first bytes are no text in UTF-8 of this kind."""
    for magic, (what, advice) in MAGIC.items():
        if head.lower().startswith(magic.lower()):
            raise UserError(f"{path} is {what}; {advice}")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in head:
        raise UserError(f"{path} is text in UTF-16; convert it: {_iconv(path, 'UTF-16')}")


def not_utf8(path: Path, error: UnicodeDecodeError) -> UserError:
    """The error for a file whose bytes are no UTF-8."""
    byte = error.object[error.start]
    return UserError(
        f"{path} is not text in UTF-8 (byte 0x{byte:02x}); if it is Latin-1 or Windows-1252, as of a western European "
        f"spreadsheet, convert it: {_iconv(path, 'WINDOWS-1252')}"
    )


def check_header(path: Path, header: list[str]) -> None:
    """Refuse a CSV whose one column holds what another separator parts, or JSON."""
    line = ",".join(header)
    if line.lstrip().startswith(("{", "[")):
        raise UserError(f"{path} holds JSON, not CSV; give it a name that ends in .jsonl")
    for separator, name in SEPARATORS.items():
        if len(header) == 1 and separator in line:
            columns = ", ".join(next(csv.reader([line], delimiter=separator)))
            read = f"pandas.read_csv({str(path)!r}, sep={separator!r})"
            raise UserError(
                f"{path} has {name} between its columns ({columns}), but CSV has commas; save it with commas, or "
                f"python -c \"import pandas; {read}.to_csv('NEW.csv', index=False)\""
            )


def check_json(path: Path, text: str) -> None:
    """Refuse JSON that is neither an array nor an object a line, but an object over several lines; and CSV."""
    start = text.lstrip()
    first = start.partition("\n")[0].strip()
    if not start.startswith("{"):
        if first and not first.startswith("[") and any(mark in first for mark in (",", *SEPARATORS)):
            raise UserError(f"{path} does not begin with {{ or [, so it is not JSON; if it is CSV, name it .csv")
        return
    try:
        json.loads(first)
        return
    except (ValueError, RecursionError):
        pass
    try:
        record, end = json.JSONDecoder().raw_decode(start)
    except (ValueError, RecursionError):
        return  # malformed, which is said with the line
    lists = [key for key, value in record.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if lists and not start[end:].strip():
        raise UserError(
            f"{path} is one JSON object with its rows in {lists[0]!r}; keep these alone: "
            f"jq '.[\"{lists[0]}\"]' {quote(str(path))} > NEW.json"
        )
    raise UserError(
        f"{path} holds JSON objects of several lines each; put each on a line of its own: "
        f"jq -c . {quote(str(path))} > NEW.jsonl"
    )


def _iconv(path: Path, encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8 {quote(str(path))} > NEW{''.join(path.suffixes[-1:])}"
