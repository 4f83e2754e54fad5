"""Which columns of a user's files hold what, and how rows become clients: by their names, and by what they hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.rows import Row, Source, file_rows, owners
from llm_fed.rows import columns as usual_columns
from llm_fed.rows.columns import REQUIRED
from llm_fed.rows.layout import FolderLayout
from llm_fed.settings.config import ColumnsConfig, PartitionConfig
from llm_fed.tasks.examples import SAMPLE
from llm_fed.tasks.files import plan_of


@dataclass(frozen=True)
class UserChoices:
    """What the user said beforehand."""

    data: str
    base: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)  # role -> column
    clients: int | None = None  # that the rows are dealt out to, where no column says whose they are
    method: str | None = None


def decide(path: Path, given: UserChoices) -> tuple[dict[str, Any], PartitionConfig, str]:
    """The columns that the configuration has to name (the usual names need not be), how rows become clients, and how
    the column of the clients was chosen, if it was.

    Raises:
        UserError: it is not plain.
    """
    looked = _Looked.at(path, given)
    if looked.file is None:
        return looked.chosen, PartitionConfig(), ""  # loading it says what is wrong
    form = usual_columns.form_of(looked.chosen, looked.names, looked.sample)
    if form == "pairs":
        looked.chosen.update(_prompt_and_answer(looked.file, looked.names, looked.chosen))
    roles = {role: _found(role, looked.names, ()) for role in usual_columns.FORMS[form]} | looked.chosen
    return looked.divided({role: name for role, name in roles.items() if name})


def decide_labelled(path: Path, given: UserChoices) -> tuple[dict[str, Any], PartitionConfig, str, list[str]]:
    """The same of texts with labels, and labels of the first rows.

    Raises:
        UserError: it is not plain.
    """
    looked = _Looked.at(path, given)
    if looked.file is None:
        return looked.chosen, PartitionConfig(), "", []
    with said_as_options():
        roles = usual_columns.resolve_labelled(
            ColumnsConfig(**looked.chosen), looked.names, looked.sample, looked.file, whose=True, side=True
        )
    labels = [str(value).strip() for row in looked.sample if (value := row.get(roles["answer"])) is not None]
    return *looked.divided(roles), labels


@contextmanager
def said_as_options() -> Iterator[None]:
    """Within it, a mistake with columns names the options of `llm-fed init` instead of settings."""
    try:
        yield
    except UserError as error:
        said = re.sub(r"set task\.columns\.(prompt|input|answer|client)=COLUMN", r"give --\1 COLUMN", str(error))
        raise UserError(re.sub(r"task\.columns\.(prompt|input|answer|client)=", r"--\1 ", said)) from error


def _found(role: str, names: Sequence[str], taken: Collection[str]) -> str | None:
    """The column with a usual name."""
    less = usual_columns.less_usual(role, names, taken) if role in REQUIRED else None
    return usual_columns.usual(role, names, taken) or less


@dataclass
class _Looked:
    """What the first rows of the training files show."""

    path: Path
    given: UserChoices
    layout: FolderLayout
    files: list[Source]
    file: str | None  # the first that has rows, or of which something has to be asked
    sample: list[dict[str, Any]]
    names: list[str]  # of its columns
    chosen: dict[str, Any]  # role -> column, as far as it is not the usual one

    @classmethod
    def at(cls, path: Path, given: UserChoices) -> _Looked:
        with said_as_options():
            root, layout = plan_of(path, ColumnsConfig(client=given.columns.get("client")))
        names = [name for part in layout.parts if part.split == "train" for name in part.files]
        files = [file_rows(root / name, layout.keys(name), layout.features) for name in names]
        file, sample = _first_rows(files, given.columns)
        names = list(dict.fromkeys(name for values in sample for name in values))
        return cls(path, given, layout, files, file, sample, names, dict(given.columns))

    def divided(self, roles: Mapping[str, str]) -> tuple[dict[str, Any], PartitionConfig, str]:
        """The columns to name, how rows become clients, and how their column was chosen; `roles` are known by now."""
        dealt, named = self.given.clients, {part.client for part in self.layout.parts} - {None}
        if dealt is not None and (named or "client" in self.chosen):
            whose = f"the names of the files in {self.path}" if named else "--client and its column"
            raise UserError(f"--clients splits the rows at random, but {whose} say whose they are; leave one out")
        if dealt is not None:
            return self.chosen, PartitionConfig("iid", clients=dealt), ""
        if len(named) > 1 or "client" in self.chosen or usual_columns.usual("client", self.names, ()):
            return self.chosen, PartitionConfig(), ""
        found = owners.find(self.files, roles.values())
        if found is None and named:
            return self.chosen, PartitionConfig(), ""
        if found is None:
            raise UserError(
                f"{self.file}: no column names the clients among {usual_columns.few(self.names)}; give --client "
                "COLUMN, or --clients N to split the rows at random among N clients"
            )
        how = f"by the column {found[0]} ({found[1]:,} values); --client chooses another"
        return {**self.chosen, "client": found[0]}, PartitionConfig(), how


def _prompt_and_answer(file: str, names: Sequence[str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Those of the two that have no usual name. A label is an answer where the base writes texts."""
    columns: dict[str, str] = {}
    for role in (role for role in REQUIRED if role not in chosen):
        taken = {*chosen.values(), *columns.values()}
        if _found(role, names, taken):
            continue
        label = usual_columns.pick(usual_columns.LABELS, names) if role == "answer" else None
        if label:
            columns[role] = label
        else:
            options = " and ".join(f"--{each} COLUMN" for each in REQUIRED)
            raise UserError(f"{file}: none of the columns {', '.join(names)} looks like the {role}; give {options}")
    return columns


def _first_rows(files: Sequence[Source], given: Mapping[str, str]) -> tuple[str | None, list[dict[str, Any]]]:
    """Some rows of the first file that has any that can be read; of files with other columns, of the first in which
    prompt or answer has no usual name and is not given."""
    first: tuple[str | None, list[dict[str, Any]]] = None, []
    seen: set[tuple[str, ...]] = set()
    for file in files:
        rows = [row.values for row in islice(file, SAMPLE) if isinstance(row, Row)]
        names = tuple(dict.fromkeys(name for values in rows for name in values))
        if not rows or names in seen:
            continue
        seen.add(names)
        first = first if first[1] else (file.where, rows)
        known = {role: name for role, name in given.items() if name in names}
        unclear = usual_columns.form_of(known, names, rows) == "pairs" and not all(
            known.get(role) or _found(role, names, ()) for role in REQUIRED
        )
        if unclear:
            return file.where, rows
    return first
