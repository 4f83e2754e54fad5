"""Rows of files as Examples of clients, and what is left out on the way."""

from __future__ import annotations

import re
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

ALL = "all"  # the client of rows that nothing says more of
HINT = "; or set task.bad_rows=skip to leave such rows out"
WHOLE = re.compile(r"(-?\d+)\.0+")  # a whole number, as a column with gaps writes it


class Collected:
    """The rows of sources, whose names all begin with `folder`, as Examples of clients; `reading` says what became of
    them."""

    scheme: ClassVar[type[Scheme]] = Scheme  # how rows become Examples

    def __init__(self, config: TaskConfig, where: str, folder: str = ""):
        self.config, self.where = config, where
        self.reading = Reading(folder)
        self._examples: list[tuple[str, str, Example]] = []  # with the id of the client, and the split
        self._written: dict[str, str] = {}  # client id -> the name that it was made of
        self._ids: dict[str, str] = {}
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

    def requested(self, id: str) -> bool:
        """Whether the rows of a client are wanted. Of another one the name is kept, which messages list."""
        whole = WHOLE.fullmatch(id)
        if self._groups is None or id in self._groups or (whole and whole[1] in self._groups):
            return True
        self.name(id)
        return False

    def clients(self) -> dict[str, ClientData]:
        """By id, in natural order; also those without a row that are named. UserError where there is no row at all."""
        if self._groups is None and not self._examples:
            empty = f" (none in {few(self.reading.empty, 'files')})" if self.reading.empty else ""
            raise UserError(f"{self.where} has no rows{empty}; it needs a train split with at least one row")
        ids = {*self._named, *(id for id, _, _ in self._examples)}
        whole = {id: match[1] for id in ids if (match := WHOLE.fullmatch(id)) and match[1] in ids}  # 11.0 is 11
        order = sorted(ids - {*whole}, key=natural_order)
        found = {id: {split: list[Example]() for split in SPLIT_NAMES} for id in order}
        for id, split, example in sorted(self._examples, key=lambda each: each[0] in whole):
            found[whole.get(id, id)][split].append(example)
        return {id: ClientData(id, **{split: tuple(own) for split, own in found[id].items()}) for id in order}

    def taken(self, example: Example, split: str) -> Example:
        """What is kept of a row's Example."""
        return example

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
        self._learn(source, scheme, sample, client)
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
        self._examples.append((id, split, self.taken(example, split)))

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
        reading.unused_columns(columns.unused(scheme.names, used), by_files=client is not None)
        reading.roles = reading.roles or scheme.roles
        reading.texts |= "text" in scheme.roles


def _split(row: Row, column: str) -> str:
    said = text_of(row, column).strip()
    if (split := split_of(said)) is None:
        raise UserError(f"{row.where}: column {column!r} holds {said[:40]!r}, which names no split")
    return split
