"""Rows of a user's files, in whatever form they lie there, or of a Hub data set, with what their source declares."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from decimal import Decimal
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, no_locks, one_line
from llm_fed.rows import declared, formats

if TYPE_CHECKING:
    from datasets import Dataset


Cell: TypeAlias = "str | int | float | Decimal | date | time | Sequence[Cell] | Mapping[str, Cell] | None"


class Row(NamedTuple):
    """One record and where it stands, e.g. `data/train.jsonl, line 7`."""

    where: str
    values: dict[str, Cell]


class BadRow(UserError):
    """A row that cannot be used; those after it can."""

    def __init__(self, where: str, reason: str, lines: int = 1):
        super().__init__(f"{where}: {reason}")
        self.where, self.lines = where, lines  # file and line; how many lines it takes


Rows: TypeAlias = Iterator[Row | BadRow]


@dataclass
class Source:
    """Rows that one can go through several times; one that cannot be used comes as a BadRow."""

    where: str  # what they are the rows of, for messages
    # Goes through them, and may note features, remarks and names; UserError where it cannot.
    read: Callable[[Source], Iterable[Row | BadRow]]
    keys: Mapping[str, str] = field(default_factory=dict)  # of folders (`site=north`): columns with one value
    features: Mapping[str, Json] = field(default_factory=dict)  # by column what the library datasets declares of it
    remarks: list[str] = field(default_factory=list)  # how they were read, where the name says otherwise
    twice: dict[str, list[int]] = field(default_factory=dict)  # columns that are there again, with indices (1, 2, ...)
    single: bool = False  # whether a .json turned out to be one object: a row, or no data at all

    def __iter__(self) -> Rows:
        return iter(self.read(self))

    def good(self) -> Iterator[Row]:
        """The rows, of which each must be good, else its BadRow is raised."""
        for row in self:
            if isinstance(row, BadRow):
                raise row
            yield row

    def row(self, at: str, values: Cell) -> Row | BadRow:
        """A row with what is declared of it: names of classes instead of their numbers, and keys of folders. `at`: its
        place, which goes behind `where`."""
        where = f"{self.where}{at}"
        if not isinstance(values, dict):
            said = one_line(json.dumps(values, default=str), 60)
            return BadRow(where, f"an object with named columns is needed, got {said}")
        try:
            values = declared.with_names(values, self.features) if self.features else values
        except ValueError as error:
            return BadRow(where, str(error))
        for key, value in self.keys.items():
            if key in values and str(values[key]) != value:
                return BadRow(where, f"column {key!r} holds {values[key]!r:.40}, but the name of its folder {value!r}")
        return Row(where, {**values, **self.keys})

    def remark(self, text: str) -> None:
        if text and text not in self.remarks:
            self.remarks.append(text)

    def note_names(self, names: Sequence[str]) -> None:
        """Note which names of columns are there more than once."""
        for name, count in Counter(names).items():
            if name and count > 1:
                self.twice[name] = [index for index, each in enumerate(names, 1) if each == name]


def file_rows(path: Path, keys: Mapping[str, str] | None = None, features: Mapping[str, Json] | None = None) -> Source:
    """The rows of one file; going through them raises a UserError where it cannot be read."""
    return Source(str(path), partial(_read_file, path), keys or {}, features or {})


def _read_file(path: Path, source: Source) -> Rows:
    data = None
    try:
        data = formats.DataFile(path)
        if data.kind in ("json", "csv") and formats.kind_of(path.name) != data.kind:
            source.remark(f"as {data.kind.upper()}")
        readers = import_module("llm_fed.rows.readers")  # with pyarrow, which takes long to import
        yield from getattr(readers, f"{data.kind}_rows")(source, data)
        source.remark(data.remark)
    except UserError:
        raise
    except Exception as error:
        # Libraries may raise anything for bytes that they do not expect.
        by_library = data is not None and formats.KINDS[data.kind].by_library
        if not by_library and not isinstance(error, formats.unreadable()):
            raise
        said = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be read: {said}; write it again, or leave it out") from error


def part_rows(where: str, part: Dataset) -> Source:
    """The rows of one split of a Hub data set."""

    def read(source: Source) -> Rows:
        return (source.row(f", row {number}", cast(Cell, values)) for number, values in enumerate(part, 1))

    return Source(where, read, features=part.features.to_dict() if part.features else {})


def rows_at_hand(where: str, rows: Sequence[Row]) -> Source:
    """Rows that are there already."""
    return Source(where, lambda source: rows)


def hub_rows(name: str, /, **options: Any) -> dict[str, list[Row]]:
    """The rows of a Hub data set by split, through `datasets.load_dataset(name, **options)`."""
    parts = hub_data(name, **options)
    return {split: list(part_rows(f"{name} ({split})", part).good()) for split, part in parts.items()}


def hub_data(source: str | Path, /, **options: Any) -> dict[str, Dataset]:
    """A Hub data set, or a folder laid out like one, by split; UserError where it cannot be read."""
    import datasets  # takes seconds to import, and a wrong setting is to be named at once

    try:  # an absolute path is never asked of the Hub
        data = datasets.load_dataset(source if isinstance(source, str) else str(source.resolve()), **options)
    except Exception as error:  # of any kind, as it reads files of any kind, with several other libraries
        reason = no_locks(error) or str(error).partition("\n")[0]
        what = f"the Hub data set {source!r}" if isinstance(source, str) else f"the folder {source}"
        raise UserError(f"{what} cannot be read: {reason}") from error
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    return {str(split): cast("Dataset", part) for split, part in splits.items()}
