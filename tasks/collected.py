"""Rows of files as Examples of clients, and what is left out on the way."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import ClassVar

from llm_fed.basics import names
from llm_fed.basics.errors import UserError
from llm_fed.rows import BadRow, Row, Source, columns
from llm_fed.rows.cells import text_of
from llm_fed.rows.layout import SPLIT_NAMES, natural_order, split_of
from llm_fed.rows.reading import Reading, Skipped, few
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example
from llm_fed.tasks.examples import SAMPLE, Scheme
from llm_fed.tasks.stored import Store, Stored

ALL = "all"  # the client of rows that nothing says more of
HINT = "; or set task.bad_rows=skip to leave such rows out"
WHOLE = re.compile(r"(-?\d+)\.0+")  # a whole number, as a column with gaps writes it


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
            if not self.asked(self.id(client)):
                return
        for source in sources:
            self._read(source, client, split, named)

    def name(self, client: str) -> None:
        """Note a client, of whom there may be no row."""
        self._named.add(self.id(client))
        self._of(self.id(client))

    def asked(self, id: str) -> bool:
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
                for split, places in self._places.pop(id).items():
                    self._places[match[1]][split].extend(places)
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
            # A `metadata.json` among the files of clients; a file that is asked for by its name is refused.
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
            if places := source.twice.get(name):
                listed = " and ".join(map(str, places))
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
        if not self.asked(id):
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
