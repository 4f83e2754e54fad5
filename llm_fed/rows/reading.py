"""What became of a user's files: what was not used, how they were read, and which rows were left out."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_fed.basics.errors import UserError, one_line, printable

MOST_BAD = 0.1  # share of the rows that `task.bad_rows: skip` may leave out
_FEW = 5  # names in a line
_EVENTS = {"not used": "not used", "note": "noted", "read": "read otherwise", "left out": "rows left out"}
# What a column means whose content would change what is learned, where it is not used.
_MEANINGS = {
    "weight": "all rows count alike", "sample_weight": "all rows count alike",
    "tools": "prompts do not describe tools", "functions": "prompts do not describe tools",
    "image": "only text is read", "images": "only text is read", "audio": "only text is read",
    "split": "the names of files say the split", "history": "such rows have none", "system": "such rows have none",
    "chosen": "only one answer is learned", "rejected": "no answer is learned from as a bad one",
}  # fmt: skip


@dataclass(frozen=True)
class Skipped:
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
    texts: bool = False  # whether a file holds texts without prompts
    labels: dict[str, str] = field(default_factory=dict)  # of texts with labels: where the first row of each stands

    def unused_columns(self, names: Iterable[str], by_files: bool) -> None:
        """Note unused columns of a file; `by_files`: whether the names of files say whose its rows are."""
        for name in names:
            self.columns[name] = None
            if name.casefold() in ("client", "client_id") and by_files:
                why = f"files name the clients; task.columns.client={name} would use it"
            else:
                why = _MEANINGS.get(name.casefold(), "")
            if why:
                self.asides[f"column {name!r} is not used: {why}"] = None

    def checked(self) -> Reading:
        """This, or UserError where too much was left out: how much, and the first of it."""
        bad = sum(each.rows for each in self.skipped)
        if bad > MOST_BAD * self.rows:
            raise UserError(
                f"{bad:,} of {self.rows:,} rows cannot be used, more than the {MOST_BAD:.0%} that task.bad_rows=skip "
                f"leaves out: {self._first_skipped(3)}; correct the files, or the columns"
            )
        return self

    def for_people(self) -> dict[str, str]:
        """Lines by their label; none where there is nothing to say."""
        unused = [*(f"{name} (no rows)" for name in self.empty), *self.files]
        parts = [few(unused, "files")] if unused else []
        if self.columns:
            parts.append(f"column{'s' if len(self.columns) > 1 else ''} {few([*self.columns], 'columns')}")
        lines = {"not used": "; ".join(parts), "note": few([*self.asides], "notes", sep="; "), "read": self._forms()}
        if self.skipped:
            bad = sum(each.rows for each in self.skipped)
            lines["left out"] = f"{bad:,} of {self.rows:,} rows (task.bad_rows=skip): {self._first_skipped(3)}"
        return {label: printable(text) for label, text in lines.items() if text}

    def events(self) -> list[dict[str, Any]]:
        """The same for metrics.jsonl, and whether it is only information, of which nothing went wrong."""
        about = {label: {} if label == "left out" else {"information": True} for label in _EVENTS}
        return [{"event": _EVENTS[of], "reason": text, **about[of]} for of, text in self.for_people().items()]

    def skipped_lines(self) -> list[dict[str, Any]]:
        """Every row that was left out."""
        return [dataclasses.asdict(each) | {"where": self.short(each.where)} for each in self.skipped]

    def short(self, where: str) -> str:
        """A file, or a row of it, without the folder of all."""
        return where.removeprefix(self.folder)

    def _forms(self) -> str:
        files = defaultdict[str, list[str]](list)
        for name, form in self.forms.items():
            files[form].append(name)
        return "; ".join(f"{few(names, 'files', 2)} {form}" for form, names in files.items())

    def _first_skipped(self, count: int) -> str:
        first = [f"{self.short(each.where)}: {one_line(each.reason, 120)}" for each in self.skipped[:count]]
        return "; ".join(first) + ("; ..." if len(self.skipped) > count else "")


def few(names: Sequence[str], what: str, most: int = _FEW, sep: str = ", ") -> str:
    """Some names, and how many more there are."""
    if len(names) <= most + 1:
        return sep.join(names)
    return f"{sep.join(names[:most])} and {len(names) - most:,} more {what}"
