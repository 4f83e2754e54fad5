"""Rows of files as Examples of clients, and what became of the files: what was not used, how they were read, and which
rows were left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import NamedTuple

from llm_fed.basics import names
from llm_fed.basics.errors import UserError, listed, one_line, printable
from llm_fed.rows import BadRow, Row, Source, columns
from llm_fed.rows.cells import text_of
from llm_fed.rows.layout import SPLIT_NAMES, natural_order, split_of
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example
from llm_fed.tasks.examples import SAMPLE, Scheme

ALL = "all"  # the client of rows that nothing says more of
HINT = "; or set task.bad_rows=skip to leave such rows out"
WHOLE = re.compile(r"(-?\d+)\.0+")  # a whole number, as a column with gaps writes it
MOST_BAD = 0.1  # share of the rows that `task.bad_rows: skip` may leave out
_FEW = 5  # names in a line
_EVENTS = {"note": "noted", "read": "read otherwise", "columns": "columns by file", "left out": "rows left out"}
# What a column means whose content would change what is learned, where it is not used.
_MEANINGS = {
    "weight": "all rows count alike", "sample_weight": "all rows count alike",
    "tools": "prompts do not describe tools", "functions": "prompts do not describe tools",
    "image": "only text is read", "images": "only text is read", "audio": "only text is read",
    "split": "the names of files say the split", "history": "such rows have none", "system": "such rows have none",
    "chosen": "only one answer is learned", "rejected": "no answer is learned from as a bad one",
}  # fmt: skip


class Skipped(NamedTuple):
    """A row that was left out."""

    where: str  # file and line
    reason: str
    rows: int = 1  # how many rows it may have been


@dataclass
class Reading:
    """What became of the files of a task; nothing is said where all of it was used as it is."""

    folder: str = ""  # what the names of files begin with, which no line repeats
    files: list[str] = field(default_factory=list)  # that were not used, for whatever reason
    empty: list[str] = field(default_factory=list)  # files without a row
    columns: dict[str, None] = field(default_factory=dict)  # that were not used, and are not plainly numbers of rows
    used: set[str] = field(default_factory=set)  # columns of any file
    asides: dict[str, None] = field(default_factory=dict)  # what should be known of single columns and clients
    forms: dict[str, str] = field(default_factory=dict)  # file -> how it was read, where that had to be found out
    rows: int = 0  # with those that were left out
    skipped: list[Skipped] = field(default_factory=list)  # the rows that were left out
    roles: dict[str, str] = field(default_factory=dict)  # role -> column, of the first file
    questions: dict[str, list[str]] = field(default_factory=dict)  # columns of prompt and answer, in words -> files
    texts: bool = False  # whether a file holds texts without prompts
    labels: Mapping[str, str] = field(default_factory=dict)  # of texts with labels: where each stands first

    def checked(self) -> Reading:
        """This, or UserError where too much was left out: how much, and the first of it."""
        bad = sum(each.rows for each in self.skipped)
        if bad > MOST_BAD * self.rows:
            raise UserError(
                f"{bad:,} of {self.rows:,} rows cannot be used, more than the {MOST_BAD:.0%} that "
                f"task.bad_rows=skip leaves out: {self._first_skipped()}; correct the files, or the columns"
            )
        return self

    def for_people(self) -> dict[str, str]:
        """Lines by their label; none where there is nothing to say."""
        lines: dict[str, str] = {}
        unused = [*(f"{name} (no rows)" for name in self.empty), *self.files]
        parts = [listed(unused, _FEW)] if unused else []
        if self.columns:
            parts.append(f"column{'s' if len(self.columns) > 1 else ''} {listed([*self.columns], _FEW)}")
        if parts:
            lines["not used"] = "; ".join(parts)
        if self.asides:
            lines["note"] = listed([*self.asides], _FEW, "; ")
        files = defaultdict[str, list[str]](list)
        for name, form in self.forms.items():
            files[form].append(name)
        if files:
            lines["read"] = "; ".join(f"{listed(names, 2)} {form}" for form, names in files.items())
        if len(self.questions) > 1:
            lines["columns"] = "; ".join(f"{words} in {listed(names, 2)}" for words, names in self.questions.items())
        if self.skipped:
            bad = sum(each.rows for each in self.skipped)
            lines["left out"] = f"{bad:,} of {self.rows:,} rows (task.bad_rows=skip): {self._first_skipped()}"
        return {label: printable(text) for label, text in lines.items()}

    def events(self) -> list[dict[str, str | bool]]:
        """The lines of metrics.jsonl that say so, and whether each is only information."""
        return [
            {"event": _EVENTS.get(key, key), "reason": text, **({} if key == "left out" else {"information": True})}
            for key, text in self.for_people().items()
        ]

    def skipped_lines(self) -> list[dict[str, str | int]]:
        """Every row that was left out."""
        return [each._asdict() | {"where": each.where.removeprefix(self.folder)} for each in self.skipped]

    def _first_skipped(self) -> str:
        first = [f"{each.where.removeprefix(self.folder)}: {one_line(each.reason, 120)}" for each in self.skipped[:3]]
        return "; ".join(first) + ("; ..." if len(self.skipped) > 3 else "")


class Placed(NamedTuple):
    """An Example of a client."""

    client: str  # id
    split: str
    example: Example


class Collected:
    """The rows of sources, whose names all begin with `folder`, as Examples of clients, by a kind of `scheme`."""

    def __init__(self, config: TaskConfig, where: str, folder: str = "", scheme: type[Scheme] = Scheme):
        self.config, self.where, self._scheme = config, where, scheme
        self.reading = Reading(folder)  # what became of the sources
        self.examples: list[Placed] = []  # in the order of the rows
        self._written: dict[str, str] = {}  # client id -> the name that it was made of
        self._ids: dict[str, str] = {}
        self._named = set[str]()  # ids that files or folders say, of whom there may be no row
        groups = config.groups
        self._groups = None if groups is None else {names.folder_name(name) for name in groups}

    def add(self, client: str | None, split: str, sources: Iterable[Source], *, named: bool = True) -> None:
        """Rows of a client, or of those that a column names. UserError where a source or a row cannot be used. `named`:
        whether the split is said; else a column may say it. Of clients outside `task.groups` nothing is read."""
        if client is None or self.requested(self.name(client)):
            for source in sources:
                self._read(source, client, split, named)

    def name(self, client: str) -> str:
        """Note a client, of whom there may be no row; its id."""
        id = self.id(client)
        self._named.add(id)
        return id

    def requested(self, id: str) -> bool:
        """Whether the rows of a client are wanted. Of another one the name is kept, which messages list."""
        whole = WHOLE.fullmatch(id)
        if self._groups is None or id in self._groups or (whole and whole[1] in self._groups):
            return True
        self._named.add(id)
        return False

    def clients(self) -> dict[str, ClientData]:
        """By id, in natural order; also those without a row that are named. UserError where there is no row at all."""
        if self._groups is None and not self.examples:
            empty = f" (none in {listed(self.reading.empty, _FEW)})" if self.reading.empty else ""
            raise UserError(f"{self.where} has no rows{empty}; it needs a train split with at least one row")
        ids = {*self._named, *(id for id, _, _ in self.examples)}
        whole = {id: match[1] for id in ids if (match := WHOLE.fullmatch(id)) and match[1] in ids}  # 11.0 is 11
        order = sorted(ids - {*whole}, key=natural_order)
        found = {id: {split: list[Example]() for split in SPLIT_NAMES} for id in order}
        for id, split, example in sorted(self.examples, key=lambda each: each.client in whole):
            found[whole.get(id, id)][split].append(example)
        return {id: ClientData(id, **{split: tuple(own) for split, own in found[id].items()}) for id in order}

    def id(self, name: str) -> str:
        """The id of a client: its name, fit for a folder; UserError where another client has that one."""
        if name in self._ids:
            return self._ids[name]
        id, composed = names.folder_name(name), names.composed(name)
        if (other := self._written.setdefault(id, composed)) != composed:
            raise UserError(
                f"{self.where}: the clients {other!r} and {composed!r} would both be called {id!r}; rename one"
            )
        if id != composed:
            self.reading.asides[f"client {composed!r} is called {id!r}, since no folder can have its name"] = None
        self._ids[name] = id
        return id

    def _read(self, source: Source, client: str | None, split: str, named: bool) -> None:
        """Load the rows of one source, find whose each is and in which split, encode it as an Example, and store it."""
        config, where = self.config, source.where
        scheme = self._scheme(config.columns, where, label=config.partition.label, whose=client is None, side=not named)
        rows, total, taken, skipped = iter(source), 0, 0, list[Skipped]()
        sample = list(islice(rows, SAMPLE))
        if good := [row for row in sample if isinstance(row, Row)]:
            try:
                self._learn(source, scheme, good, client)
            except UserError:
                # A `metadata.json` among the files of clients; a file that is requested by its name is refused.
                if client is None or not source.single:
                    raise
                self.reading.files.append(where.removeprefix(self.reading.folder))
                return self._named.discard(self.id(client))
        elif sample:
            first = [self._left_out(row, UserError(str(row))) for row in sample][0]
            reason = f"{first.where}: {first.reason}"
            raise UserError(f"none of the first {len(sample)} rows of {where} can be used: {reason}")
        for row in chain(sample, rows):
            total += row.lines if isinstance(row, BadRow) else 1
            try:
                self._take(scheme, row, client, split)
                taken += 1
            except UserError as error:
                skipped.append(self._left_out(row, error))
        if total and not taken:
            first = skipped[0]
            raise UserError(f"none of the {total:,} rows of {where} can be used: {first.where}: {first.reason}")
        self.reading.skipped += skipped
        self._note(source, scheme, total, client)

    def _learn(self, source: Source, scheme: Scheme, good: Sequence[Row], client: str | None) -> None:
        """Choose the columns, and refuse those that are there twice."""
        scheme.learn(good)
        for name in scheme.used:
            if indices := source.twice.get(name):
                which = " and ".join(map(str, indices))
                raise UserError(
                    f"{source.where}: columns {which} are both named {name!r}; rename those that are not meant"
                )
        if client is None and "client" not in scheme.roles and self.config.partition.kind == "natural":
            raise UserError(
                f"{self.where}: no column names the client of a row; set task.columns.client=COLUMN, "
                "or task.partition.kind=iid and task.partition.clients=N"
            )

    def _take(self, scheme: Scheme, row: Row | BadRow, client: str | None, split: str) -> None:
        if isinstance(row, BadRow):
            raise row
        roles = scheme.roles
        if client is None:
            client = text_of(row, roles["client"]).strip() if "client" in roles else ALL
        id = self.id(client)
        if "split" in roles:
            said = text_of(row, roles["split"]).strip()
            if (named := split_of(said)) is None:
                raise UserError(f"{row.where}: column {roles['split']!r} holds {said[:40]!r}, which names no split")
            split = named
        if self.requested(id):
            self.examples.append(Placed(id, split, scheme.example(row, id)))

    def _left_out(self, row: Row | BadRow, error: UserError) -> Skipped:
        """A bad row; UserError where none may be left out."""
        if self.config.bad_rows == "stop":
            raise UserError(f"{error}{HINT}") from error
        lines = row.lines if isinstance(row, BadRow) else 1
        return Skipped(row.where, str(error).removeprefix(f"{row.where}: "), lines)

    def _note(self, source: Source, scheme: Scheme, total: int, client: str | None) -> None:
        """Note what became of a source."""
        reading, name = self.reading, source.where.removeprefix(self.reading.folder)
        if not total:
            reading.empty.append(name)
        reading.rows += total
        if source.remarks:
            reading.forms[name] = ", ".join(source.remarks)
        reading.used.update(scheme.used)
        reading.roles = reading.roles or scheme.roles
        if scheme.roles.keys() >= {*columns.REQUIRED}:
            words = ", ".join(f"{role} = {scheme.roles[role]}" for role in columns.REQUIRED)
            reading.questions.setdefault(words, []).append(name)
        reading.texts |= "text" in scheme.roles
        for column in columns.unused(scheme.names, scheme.used):
            reading.columns[column] = None
            why = _MEANINGS.get(column.casefold(), "")
            if client is not None and column.casefold() in ("client", "client_id"):
                why = f"files name the clients; task.columns.client={column} would use it"
            if why:
                reading.asides[f"column {column!r} is not used: {why}"] = None
