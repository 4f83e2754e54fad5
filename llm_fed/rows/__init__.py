"""Rows of a user's files, in whatever form they lie there, or of a Hub data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from llm_fed.basics import waits
from llm_fed.basics.errors import UserError
from llm_fed.rows import formats

if TYPE_CHECKING:
    from datasets import Dataset


class Row(NamedTuple):
    """One record and where it stands, e.g. `data/train.jsonl, line 7`."""

    where: str
    values: dict[str, Any]

    @property
    def file(self) -> str:
        return self.where.rpartition(", ")[0]


class BadRow(UserError):
    """A row that cannot be used; those after it can."""

    def __init__(self, where: str, reason: str, lines: int = 1):
        super().__init__(f"{where}: {reason}")
        self.where, self.lines = where, lines  # file and line; how many lines it takes


class Source:
    """Rows that one can go through several times; one that cannot be used comes as a BadRow."""

    def __init__(self, where: str):
        self.where = where  # what they are the rows of, for messages
        self.remarks: list[str] = []  # how they were read, where the name says otherwise; after one has gone through
        self.twice: dict[str, list[int]] = {}  # columns that are there more than once, with their places (1, 2, ...)
        self.nameless: set[str] = set()  # columns that hold something but have no name
        self.alone = False  # whether it is one object in a file `.json`, as descriptions of data are, too

    def __iter__(self) -> Iterator[Row | BadRow]:
        raise NotImplementedError

    def good(self) -> Iterator[Row]:
        """The rows, of which each must be good, else its BadRow is raised."""
        for row in self:
            if isinstance(row, BadRow):
                raise row
            yield row

    def remark(self, text: str) -> None:
        if text and text not in self.remarks:
            self.remarks.append(text)

    def note_names(self, names: Sequence[str]) -> None:
        """Note which names of columns are there more than once."""
        for name in (name for name, count in Counter(names).items() if name and count > 1):
            self.twice[name] = [place for place, each in enumerate(names, 1) if each == name]


class FileRows(Source):
    """The rows of one file; going through them raises a UserError where it cannot be read."""

    def __init__(self, path: Path):
        super().__init__(str(path))
        self.path = path

    def __iter__(self) -> Iterator[Row | BadRow]:
        kind = ""
        try:
            kind, encoding = formats.look(self.path)
            if kind == "json":
                from llm_fed.rows import jsonrows

                yield from jsonrows.rows(self, encoding)
            elif kind == "txt":
                yield from _text(self, encoding)
            else:
                from llm_fed.rows import tables

                yield from tables.READERS[kind](self, encoding)
        except UserError:
            raise
        except MemoryError as error:
            raise UserError(
                f"{self.path} cannot be read: it takes more memory than there is, as a damaged file may claim of its "
                "parts; write it again, in several files if it is large, or leave it out"
            ) from error
        except Exception as error:
            # Libraries read the other kinds, and may raise anything for bytes that they do not expect.
            if kind in ("", "csv", "json", "txt") and not isinstance(error, formats.unreadable()):
                raise
            said = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(f"{self.path} cannot be read: {said}; write it again, or leave it out") from error


class HubRows(Source):
    """The rows of one split of a Hub data set."""

    def __init__(self, where: str, part: Dataset):
        super().__init__(where)
        self._part = part

    def __iter__(self) -> Iterator[Row | BadRow]:
        classes = class_names(self._part)
        for number, values in enumerate(cast(Iterable[Any], self._part), 1):
            yield with_names(f"{self.where}, row {number}", dict(values), classes)


def class_names(part: Dataset) -> dict[str, Sequence[str]]:
    """By column of numbers of classes, what a data set of the library datasets calls them, in order."""
    from datasets import ClassLabel

    return {name: each.names for name, each in (part.features or {}).items() if isinstance(each, ClassLabel)}


def with_names(where: str, values: dict[str, Any], classes: Mapping[str, Sequence[str]]) -> Row | BadRow:
    """A row with the names of classes in the place of their numbers; -1 stands for none."""
    for column, names in classes.items():
        number = values.get(column)
        if isinstance(number, int) and number >= len(names):
            return BadRow(where, f"column {column!r} holds {number}, but the data set names {len(names)} classes")
        if isinstance(number, int):
            values[column] = names[number] if number >= 0 else None
    return Row(where, values)


class Listed(Source):
    """Rows that are there already."""

    def __init__(self, where: str, rows: Sequence[Row]):
        super().__init__(where)
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def read_rows(path: Path) -> list[Row]:
    """All rows of one file at once; UserError where the file or a row cannot be read."""
    return list(FileRows(path).good())


def _text(file: FileRows, encoding: str) -> Iterator[Row]:
    text = formats.TextFile(file.path, encoding)
    content = "".join(text.chunks())
    file.remark(text.remark)
    if content.strip():
        yield Row(str(file.path), {"text": content.strip("\n\r")})


def hub_rows(name: str, /, **options: Any) -> dict[str, list[Row]]:
    """The rows of a Hub data set by split, through `datasets.load_dataset(name, **options)`."""
    return {split: list(HubRows(f"{name} ({split})", part).good()) for split, part in hub_data(name, **options).items()}


def hub_data(name: str, /, **options: Any) -> dict[str, Dataset]:
    """A Hub data set by split; UserError where it cannot be read."""
    return _by_split(f"the Hub data set {name!r}", name, **options)


def folder_data(folder: Path) -> dict[str, Dataset]:
    """A folder laid out like a Hub data set, by split; UserError where it cannot be read."""
    return _by_split(f"the folder {folder}", str(folder.resolve()))  # an absolute path is never asked of the Hub


def _by_split(what: str, source: str, **options: Any) -> dict[str, Dataset]:
    import datasets  # takes seconds to import, and a wrong setting is to be named at once

    try:
        data = datasets.load_dataset(source, **options)
    except Exception as error:  # of any kind, as it reads files of any kind, with several other libraries
        reason = waits.no_locks(error) or str(error).partition("\n")[0]
        raise UserError(f"{what} cannot be read: {reason}") from error
    splits = data if isinstance(data, datasets.DatasetDict) else {"train": data}
    return {str(split): cast("Dataset", part) for split, part in splits.items()}
