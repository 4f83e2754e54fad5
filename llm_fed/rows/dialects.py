"""How a table in text is written: what parts its columns, and how texts that hold that are quoted."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_NOTHING = "\x1f"  # no text has it
# How cells are quoted, and what is said of it; the first way that fits the first lines counts.
_QUOTED: dict[str, dict[str, Any]] = {
    "": {"quoting": csv.QUOTE_MINIMAL},
    "with backslashes before quotation marks": {"doublequote": False, "escapechar": "\\"},
    "without quotation marks around texts": {"quoting": csv.QUOTE_NONE},
}
csv.field_size_limit(2**31 - 1)  # by default a cell may have 131,072 letters


@dataclass(frozen=True)
class Dialect:
    """How to read a table."""

    skipped: int  # lines before the header
    options: dict[str, Any]  # of csv.reader
    remark: str = ""  # what is special about it

    def reader(self, lines: Iterable[str]) -> Any:
        """The records in these lines, the first of which is the header's."""
        return csv.reader(lines, strict=True, **self.options)


def dialect_of(head: str, usual: str) -> Dialect:
    """The dialect of a table that begins with this text. The separator is the one that makes most columns of the first
    line, or what Excel says in a line `sep=;`. Lines of one column are parted by nothing, so that their texts may hold
    commas. Where doubled quotation marks do not fit the first lines, another way of quoting counts if it fits all of
    them. The `usual` separator needs no remark."""
    lines = list(io.StringIO(head, newline=""))
    skipped = next((place for place, line in enumerate(lines) if line.strip()), len(lines))
    first, separator = "".join(lines[skipped : skipped + 1]), ""
    if (given := first.strip("\r\n")).casefold().startswith("sep=") and len(given) == 5:
        separator, skipped = given[-1], skipped + 1
        first = "".join(lines[skipped : skipped + 1])
    separator = separator or _separator(first, usual)
    blanks = first.count(separator) > 0 and first.count(separator) == first.count(f"{separator} ")
    named = "" if separator in (usual, ",", _NOTHING) else f"with {SEPARATORS.get(separator, repr(separator))}"
    ways = [
        Dialect(skipped, {"delimiter": separator, "skipinitialspace": blanks, **options}, ", ".join(filter(None, said)))
        for said, options in (((named, remark), options) for remark, options in _QUOTED.items())
    ]
    records = lines[skipped:]
    tried = (way for way in ways if way is not ways[1] or '\\"' in head)
    fitting = (way for way in tried if len({*_widths(way, records)}) <= 1)
    best = next(fitting, ways[0]) if '"' in head else ways[0]
    return ways[0] if best is ways[2] and not _is_bare(best, records) else best


def is_table(line: str) -> bool:
    return _separator(line, ",") != _NOTHING


def _separator(header: str, usual: str) -> str:
    counts = {}
    for candidate in SEPARATORS:
        try:
            counts[candidate] = len(next(csv.reader([header], delimiter=candidate), []))
        except csv.Error:
            counts[candidate] = 0
    best = max(SEPARATORS, key=lambda each: (counts[each], each == usual))
    return best if counts[best] > 1 else _NOTHING


def _is_bare(dialect: Dialect, lines: Sequence[str]) -> bool:
    """Whether cells that begin with a quotation mark mostly do not end with one."""
    cells = [cell.strip() for record in dialect.reader(lines) for cell in record if cell.strip().startswith('"')]
    return sum(len(cell) < 2 or not cell.endswith('"') for cell in cells) > len(cells) / 2


def _widths(dialect: Dialect, lines: Sequence[str]) -> Iterator[int]:
    """How many cells each record has, -1 where it is none; the last one may be cut off."""
    reader = dialect.reader(lines)
    while True:
        try:
            if cells := next(reader):
                yield len(cells)
        except StopIteration:
            return
        except csv.Error as error:
            if "unexpected end of data" not in str(error):
                yield -1
