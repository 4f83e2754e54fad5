"""Rows of files as Examples of clients, and what is left out on the way."""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice
from typing import ClassVar

from llm_fed.basics import names
from llm_fed.basics.errors import UserError
from llm_fed.rows import BadRow, Row, Source, columns
from llm_fed.rows.cells import text_of
from llm_fed.rows.layout import SPLIT_NAMES, natural_order, split_of
from llm_fed.rows.reading import Reading, Skipped, few
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.choices import Again
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
        self._by_column = False
        self._has = set[str]()  # roles whose configured column some file has
        self._lacks: dict[str, tuple[str, list[str]]] = {}  # the first file without it, and its columns
        self._named = set[str]()  # ids that files or folders say, of whom there may be no row

    def add(self, client: str | None, split: str, sources: Iterable[Source], *, named: bool = True) -> None:
        """Rows of a client, or of those that a column names. UserError where a source or a row cannot be used. `named`:
        whether the split is said; else a column may say it."""
        self._by_column |= client is None
        if client is not None:
            self.name(client)
        for source in sources:
            for (id, part), places in self._read(source, client, split, named).items():
                self._of(id)[part].extend(places)

    def name(self, client: str) -> None:
        """Note a client, of whom there may be no row."""
        self._named.add(self.id(client))
        self._of(self.id(client))

    def clients(self) -> dict[str, ClientData]:
        """By id, in natural order; also those without a row that are named. UserError where there is no row at all."""
        for id in [*self._places]:
            if (match := WHOLE.fullmatch(id)) and match[1] in self._places:  # 11.0 is 11 in a column with gaps
                for split, places in self._places.pop(id).items():
                    self._places[match[1]][split].extend(places)
        if not any(any(splits.values()) for splits in self._places.values()):
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

    def _read(
        self, source: Source, client: str | None, split: str, named: bool
    ) -> Mapping[tuple[str, str], array[int]]:
        """(client, split) -> places of the rows of one source."""
        scheme = self.scheme(self.config.columns, source.where, whose=client is None, side=not named)
        while True:
            taken = _Taken(self, source, scheme, client, split)
            try:
                taken.all()
                break
            except Again:
                continue
        name, label = self.reading.short(source.where), self.config.partition.label
        if taken.is_description:
            self.reading.files.append(name)
            self._named.discard(self.id(client or ALL))
            return taken.places
        if not taken.count:
            self.reading.empty.append(name)
        self.reading.rows += taken.count
        self.reading.skipped += taken.skipped
        if source.remarks:
            self.reading.forms[name] = ", ".join(source.remarks)
        used = [*scheme.used, *([label] if label else [])]
        self.reading.used.update(used)
        unused = columns.unused(scheme.names, used)
        self.reading.unused_columns([*unused, *sorted(source.nameless)], by_files=client is not None)
        self.reading.roles = self.reading.roles or scheme.roles
        self.reading.columns_of(name, scheme.roles)
        for role in columns.REQUIRED if taken.count else ():
            if getattr(scheme.here, role):
                self._has.add(role)
            elif getattr(scheme.wanted, role):
                self._lacks.setdefault(role, (source.where, [*scheme.names]))
        self.reading.texts |= "text" in scheme.roles
        return taken.places


class _Taken:
    """What is made of one source: the places of its rows, and those that are left out."""

    def __init__(self, of: Collected, source: Source, scheme: Scheme, client: str | None, split: str):
        self._of, self._config, self._source, self._scheme = of, of.config, source, scheme
        self._client, self._split = client, split
        self.places: dict[tuple[str, str], array[int]] = defaultdict(lambda: array("q"))
        self.skipped: list[Skipped] = []
        self.count = 0  # of rows, also of those that are left out
        self.is_description = False  # whether it is one object of JSON that is no row

    def all(self) -> None:
        """Make an Example of each row. UserError where the source or a row cannot be used, and Again where what was
        thought of the first rows does not hold."""
        rows = iter(self._source)
        sample = list(islice(rows, SAMPLE))
        if not sample:
            return
        try:
            self._learn(sample)
        except UserError:
            # A `metadata.json` among the files of clients; a file that is asked for by its name is refused.
            self.is_description = self._source.alone and self._client is not None
            if not self.is_description:
                raise
            return
        for row in chain(sample, rows):
            self.count += row.lines if isinstance(row, BadRow) else 1
            try:
                self._take(row)
            except UserError as error:
                self._leave_out(row, error)
        if not self.places:
            raise UserError(f"none of the {self.count:,} rows of {self._source.where} can be used: {self._first()}")

    def _take(self, row: Row | BadRow) -> None:
        if isinstance(row, BadRow):
            raise row
        roles, label, client = self._scheme.roles, self._config.partition.label, self._client
        if client is None:
            client = text_of(row, roles["client"]).strip() if "client" in roles else ALL
        id = self._of.id(client)
        example = self._scheme.example(row, text_of(row, label) if label else id)
        split = self._side(row, roles["split"]) if "split" in roles else self._split
        example = self._of.taken(example, row.where, split)
        self.places[id, split].append(self._of.store.add(example, self._source.where, row.where))

    def _learn(self, sample: Sequence[Row | BadRow]) -> None:
        """Choose the columns, unless that is done, and refuse those that are there twice."""
        good, where = [row for row in sample if isinstance(row, Row)], self._source.where
        if not good:
            for row in sample:
                self._leave_out(row, UserError(str(row)))
            raise UserError(f"none of the first {len(sample)} rows of {where} can be used: {self._first()}")
        if not self._scheme.names:
            self._scheme.learn(good)
        for name in self._scheme.used:
            if places := self._source.twice.get(name):
                listed = " and ".join(map(str, places))
                raise UserError(f"{where}: columns {listed} are both named {name!r}; rename those that are not meant")
        partition = self._config.partition
        if partition.label is not None:
            known = [row.values for row in good]
            columns.configured("task.partition.label", partition.label, [*self._scheme.names], known, good[0].where)
        if self._client is None and "client" not in self._scheme.roles and partition.kind == "natural":
            raise UserError(
                f"{self._of.where}: no column names the client of a row; set task.columns.client=COLUMN, "
                "or task.partition.kind=iid and task.partition.clients=N"
            )

    def _side(self, row: Row, column: str) -> str:
        said = text_of(row, column).strip()
        if (split := split_of(said)) is None:
            raise UserError(f"{row.where}: column {column!r} holds {said[:40]!r}, which names no split")
        return split

    def _leave_out(self, row: Row | BadRow, error: UserError) -> None:
        """Note a bad row; UserError where no row may be left out."""
        if self._config.bad_rows == "stop":
            raise UserError(f"{error}{HINT}") from error
        lines = row.lines if isinstance(row, BadRow) else 1
        self.skipped.append(Skipped(row.where, str(error).removeprefix(f"{row.where}: "), lines))

    def _first(self) -> str:
        return f"{self.skipped[0].where}: {self.skipped[0].reason}"
