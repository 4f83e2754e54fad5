"""Rows of files as Examples of clients, and what is left out on the way.

The Examples are one Arrow table in a temporary file, of which a client holds indices; fewer than BATCH stay in memory.
"""

from __future__ import annotations

import json
import re
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, overload

import numpy as np

from llm_fed.basics import names
from llm_fed.basics.errors import RunError, UserError
from llm_fed.rows import BadRow, Row, Source, columns
from llm_fed.rows.cells import text_of
from llm_fed.rows.layout import SPLIT_NAMES, natural_order, split_of
from llm_fed.rows.reading import Reading, Skipped, few
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example, Turn
from llm_fed.tasks.examples import SAMPLE, Scheme

if TYPE_CHECKING:  # runs without files of examples need none of it
    import pyarrow

ALL = "all"  # the client of rows that nothing says more of
HINT = "; or set task.bad_rows=skip to leave such rows out"
WHOLE = re.compile(r"(-?\d+)\.0+")  # a whole number, as a column with gaps writes it
BATCH = 4096  # examples that are written together
COLUMNS = ("example", "where")  # as JSON, and the file and the row in which it stands


class Collected:
    """The rows of sources, whose names all begin with `folder`, as Examples of clients; `reading` says what became of
    them."""

    scheme: ClassVar[type[Scheme]] = Scheme  # how rows become Examples

    def __init__(self, config: TaskConfig, where: str, folder: str = ""):
        self.config, self.where = config, where
        self.reading, self.store = Reading(folder), Store()
        self._places: dict[str, dict[str, array[int]]] = {}
        self._written: dict[str, str] = {}  # client id -> the name that it was made of
        self._ids: dict[str, str] = {}
        self._has = set[str]()  # roles whose configured column some file has
        self._lacks: dict[str, tuple[str, list[str]]] = {}  # the first file without it, and its columns
        self._named = set[str]()  # ids that files or folders say, of whom there may be no row
        groups = config.groups
        self._groups = None if groups is None else {names.folder_name(names.composed(name)) for name in groups}

    def add(self, client: str | None, split: str, sources: Iterable[Source], *, named: bool = True) -> None:
        """Rows of a client, or of those that a column names. UserError where a source or a row cannot be used. `named`:
        whether the split is said; else a column may say it. Of clients that are not among `task.groups` nothing is
        read."""
        if client is not None:
            self.name(client)
            if not self.requested(self.id(client)):
                return
        for source in sources:
            self._read(source, client, split, named)

    def name(self, client: str) -> None:
        """Note a client, of whom there may be no row."""
        self._named.add(self.id(client))
        self._of(self.id(client))

    def requested(self, id: str) -> bool:
        """Whether the rows of a client are wanted. Of another one the name is kept, which messages list."""
        whole = WHOLE.fullmatch(id)
        if self._groups is None or id in self._groups or (whole and whole[1] in self._groups):
            return True
        self.name(id)
        return False

    def clients(self) -> dict[str, ClientData]:
        """By id, in natural order; also those without a row that are named. UserError where there is no row at all."""
        for id in [*self._places]:
            if (match := WHOLE.fullmatch(id)) and match[1] in self._places:  # 11.0 is 11 in a column with gaps
                for split, indices in self._places.pop(id).items():
                    self._places[match[1]][split].extend(indices)
        if self._groups is None and not any(any(splits.values()) for splits in self._places.values()):
            empty = f" (none in {few(self.reading.empty, 'files')})" if self.reading.empty else ""
            raise UserError(f"{self.where} has no rows{empty}; it needs a train split with at least one row")
        for role in self._lacks.keys() - self._has:
            where, known = self._lacks[role]
            columns.check_column(f"task.columns.{role}", str(getattr(self.config.columns, role)), known, where)
        with_rows = {id: splits for id, splits in self._places.items() if any(splits.values()) or id in self._named}
        order = sorted(with_rows, key=natural_order)
        return {id: ClientData(id, **{s: Stored(self.store, at) for s, at in with_rows[id].items()}) for id in order}

    def taken(self, example: Example, where: str, split: str) -> Example:
        """What is kept of a row's Example; `where` it stands."""
        return example

    def _of(self, id: str) -> dict[str, array[int]]:
        if id not in self._places:
            self._places[id] = {split: array("q") for split in SPLIT_NAMES}
        return self._places[id]

    def id(self, name: str) -> str:
        """The id of a client: its name, fit for a folder; UserError where another client has that one."""
        if name in self._ids:
            return self._ids[name]
        name = names.composed(name)
        id = self._ids[name] = names.folder_name(name)
        if (other := self._written.setdefault(id, name)) != name:
            raise UserError(f"{self.where}: the clients {other!r} and {name!r} would both be called {id!r}; rename one")
        if id != name:
            self.reading.asides[f"client {name!r} is called {id!r}, since no folder can have its name"] = None
        return id

    def _read(self, source: Source, client: str | None, split: str, named: bool) -> None:
        """Load the rows of one source, find whose each is and in which split, encode it as an Example, and store it."""
        scheme = self.scheme(self.config.columns, source.where, whose=client is None, side=not named)
        rows, total, taken, skipped = iter(source), 0, 0, list[Skipped]()
        sample = list(islice(rows, SAMPLE))
        try:
            self._learn(source, scheme, sample, client)
        except UserError:
            # A `metadata.json` among the files of clients; a file that is requested by its name is refused.
            if not source.alone or client is None:
                raise
            self.reading.files.append(self.reading.short(source.where))
            return self._named.discard(self.id(client))
        for row in chain(sample, rows):
            total += row.lines if isinstance(row, BadRow) else 1
            try:
                self._take(source, scheme, row, client, split)
                taken += 1
            except UserError as error:
                skipped.append(self._left_out(row, error))
        if total and not taken:
            first = f"{skipped[0].where}: {skipped[0].reason}"
            raise UserError(f"none of the {total:,} rows of {source.where} can be used: {first}")
        self.reading.skipped += skipped
        self._note(source, scheme, total, client)

    def _learn(self, source: Source, scheme: Scheme, sample: Sequence[Row | BadRow], client: str | None) -> None:
        """Choose the columns, and refuse those that are there twice."""
        good, where = [row for row in sample if isinstance(row, Row)], source.where
        if sample and not good:
            first = [self._left_out(row, UserError(str(row))) for row in sample][0]
            reason = f"{first.where}: {first.reason}"
            raise UserError(f"none of the first {len(sample)} rows of {where} can be used: {reason}")
        if not good:
            return
        scheme.learn(good)
        for name in scheme.used:
            if indices := source.twice.get(name):
                listed = " and ".join(map(str, indices))
                raise UserError(f"{where}: columns {listed} are both named {name!r}; rename those that are not meant")
        partition = self.config.partition
        if partition.label is not None:
            known = [row.values for row in good]
            columns.configured("task.partition.label", partition.label, [*scheme.names], known, good[0].where)
        if client is None and "client" not in scheme.roles and partition.kind == "natural":
            raise UserError(
                f"{self.where}: no column names the client of a row; set task.columns.client=COLUMN, "
                "or task.partition.kind=iid and task.partition.clients=N"
            )

    def _take(self, source: Source, scheme: Scheme, row: Row | BadRow, client: str | None, split: str) -> None:
        if isinstance(row, BadRow):
            raise row
        roles, label = scheme.roles, self.config.partition.label
        if client is None:
            client = text_of(row, roles["client"]).strip() if "client" in roles else ALL
        id, split = self.id(client), _split(row, roles["split"]) if "split" in roles else split
        if not self.requested(id):
            return
        example = scheme.example(row, text_of(row, label) if label else id)
        self._of(id)[split].append(self.store.add(self.taken(example, row.where, split), source.where, row.where))

    def _left_out(self, row: Row | BadRow, error: UserError) -> Skipped:
        """A bad row; UserError where none may be left out."""
        if self.config.bad_rows == "stop":
            raise UserError(f"{error}{HINT}") from error
        lines = row.lines if isinstance(row, BadRow) else 1
        return Skipped(row.where, str(error).removeprefix(f"{row.where}: "), lines)

    def _note(self, source: Source, scheme: Scheme, total: int, client: str | None) -> None:
        """Note what became of a source."""
        reading, name, label = self.reading, self.reading.short(source.where), self.config.partition.label
        if not total:
            reading.empty.append(name)
        reading.rows += total
        if source.remarks:
            reading.forms[name] = ", ".join(source.remarks)
        used = [*scheme.used, *([label] if label else [])]
        reading.used.update(used)
        unused = columns.unused(scheme.names, used)
        reading.unused_columns([*unused, *sorted(source.nameless)], by_files=client is not None)
        reading.roles = reading.roles or scheme.roles
        reading.columns_of(name, scheme.roles)
        for role in columns.REQUIRED if total else ():
            if getattr(scheme.here, role):
                self._has.add(role)
            elif getattr(scheme.wanted, role):
                self._lacks.setdefault(role, (source.where, [*scheme.names]))
        reading.texts |= "text" in scheme.roles


def _split(row: Row, column: str) -> str:
    said = text_of(row, column).strip()
    if (split := split_of(said)) is None:
        raise UserError(f"{row.where}: column {column!r} holds {said[:40]!r}, which names no split")
    return split


class Store:
    """Examples: first all are added, then they are read. RunError where the folder for temporary files is full or
    cannot be written."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bytes, bytes]] = []
        self._count = 0
        self._file: IO[bytes] | None = None
        self._files: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        # Of each example the indices of its file and group, its digest, and a checksum of how it is written.
        self.codes, self.groups, self.digests, self.checksums = array("I"), array("I"), array("Q"), array("I")

    @property
    def files(self) -> list[str]:
        return [*self._files]

    def add(self, example: Example, file: str = "", where: str = "") -> int:
        """The place of the example from now on; `file` is the one in which it stands, `where` says its row, too."""
        e = example
        parts = (e.prompt, e.answers, e.options, e.fields, e.rejected, e.desirable, e.extra, e.pair)
        written = _bytes(json.dumps(parts, ensure_ascii=False))
        self.codes.append(self._files.setdefault(file, len(self._files)))
        self.groups.append(self._groups.setdefault(e.group, len(self._groups)))
        self.digests.append(e.digest)
        self.checksums.append(zlib.crc32(written))
        self._waiting.append((written, _bytes(where)))
        self._count += 1
        if self._count % BATCH == 0:
            self._write()
        return self._count - 1

    def __getitem__(self, index: int) -> Example:
        prompt, answers, options, fields, rejected, desirable, extra, pair = json.loads(_text(self.table[0], index))
        turns = tuple(Turn(*turn) for turn in rejected)
        requested = prompt if isinstance(prompt, str) else tuple(Turn(*turn) for turn in prompt)
        group, own = self._names[self.groups[index]], tuple((name, value) for name, value in extra)
        return Example(requested, tuple(answers), tuple(options), group, fields, turns, desirable, own, pair)

    def where(self, index: int) -> str:
        return _text(self.table[1], index)

    @cached_property
    def _names(self) -> list[str]:
        return [*self._groups]

    @cached_property
    def table(self) -> pyarrow.Table:
        """The columns of COLUMNS; what is in the file is mapped from it, and it needs no name any more."""
        import pyarrow.ipc

        if self._file is None:
            return pyarrow.Table.from_batches([self._batch()])
        self._write()
        try:
            self._writer.close()
            self._file.flush()
            table = pyarrow.ipc.open_file(pyarrow.memory_map(self._file.name)).read_all()
        except OSError as error:
            raise _unwritable(error) from error
        self._file.close()
        return table

    def _write(self) -> None:
        import pyarrow.ipc

        batch = self._batch()
        try:
            if self._file is None:
                self._file = tempfile.NamedTemporaryFile(prefix="llm_fed-", suffix=".arrow")  # noqa: SIM115
                self._writer = pyarrow.ipc.new_file(self._file, batch.schema)
            self._writer.write_batch(batch)
        except OSError as error:
            raise _unwritable(error) from error

    def _batch(self) -> pyarrow.RecordBatch:
        """Those that wait, which then wait no longer. Bytes, as JSON may hold halves of characters, which are no
        UTF-8."""
        import pyarrow

        columns = zip(*self._waiting, strict=True) if self._waiting else [()] * len(COLUMNS)
        batch = pyarrow.record_batch([pyarrow.array(each, pyarrow.binary()) for each in columns], [*COLUMNS])
        self._waiting = []
        return batch


class Stored(Sequence[Example]):
    """Examples of a store, by their indices."""

    def __init__(self, store: Store, indices: Iterable[int] = ()):
        self._store, self._places = store, np.fromiter(indices, np.int64)

    def take(self, chosen: Sequence[int]) -> Stored:
        return Stored(self._store, self._places[np.asarray(chosen, np.int64)])

    def where(self, index: int) -> str:
        """File and row of an example, for messages."""
        return self._store.where(int(self._places[index]))

    @property
    def files(self) -> list[str]:
        return self._store.files

    @property
    def codes(self) -> np.ndarray:
        """(N,) the index of each example's file in `files`."""
        return np.asarray(self._store.codes)[self._places]

    @property
    def digests(self) -> np.ndarray:
        """(N,) uint64, see `Example.digest`."""
        return np.asarray(self._store.digests)[self._places]

    @property
    def checksums(self) -> np.ndarray:
        """(N,) uint32, of how each example is written."""
        return np.asarray(self._store.checksums)[self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Stored: ...

    def __getitem__(self, index: int | slice) -> Example | Stored:
        if isinstance(index, slice):
            return Stored(self._store, self._places[index])
        return self._store[int(self._places[index])]

    def __iter__(self) -> Iterator[Example]:
        return (self._store[index] for index in self._places.tolist())

    def __add__(self, other: Sequence[Example]) -> Sequence[Example]:
        if isinstance(other, Stored) and other._store is self._store:
            return Stored(self._store, np.concatenate([self._places, other._places]))
        return (*self, *other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Example.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(column: pyarrow.ChunkedArray, index: int) -> str:
    return str(column[index].as_py().decode("utf-8", "surrogatepass"))


def _unwritable(error: OSError) -> RunError:
    folder = Path(tempfile.gettempdir())
    return RunError(
        f"cannot write the examples to {folder}: {error.strerror or error}; make room, or set TMPDIR to another folder"
    )
