"""Which columns of a user's files hold what, and how rows become clients: by their names, and by what they hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError, listed
from llm_fed.rows import Row, Source, file_rows, owners
from llm_fed.rows import columns as usual_columns
from llm_fed.rows.columns import REQUIRED
from llm_fed.rows.layout import FolderLayout
from llm_fed.settings.config import ColumnsConfig, PartitionConfig
from llm_fed.settings.configfile import section
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


def decide(path: Path, given: UserChoices) -> tuple[dict[str, str], PartitionConfig, str]:
    """The columns that the configuration has to name (the usual names need not be), how rows become clients, and how
    the column of the clients was chosen, if it was. UserError: it is not plain."""
    looked = _Looked.at(path, given)
    if looked.file is None:
        return looked.chosen, PartitionConfig(), ""  # loading it says what is wrong
    form = usual_columns.form_of(looked.chosen, looked.names, looked.sample)
    label = usual_columns.pick(usual_columns.LABELS, looked.names)  # an answer where the base writes texts
    if form == "pairs" and label and not _found("answer", looked.names, looked.chosen.values()):
        looked.chosen.setdefault("answer", label)
    roles = {role: _found(role, looked.names, ()) for role in usual_columns.FORMS[form]} | looked.chosen
    return looked.divided({role: name for role, name in roles.items() if name})


def decide_labelled(path: Path, given: UserChoices) -> tuple[dict[str, str], PartitionConfig, str, list[str]]:
    """What `decide` returns, for texts with labels, and the labels of the first rows. UserError: it is not plain."""
    looked = _Looked.at(path, given)
    if looked.file is None:
        return looked.chosen, PartitionConfig(), "", []
    with said_as_options():
        seen = usual_columns.SeenColumns(looked.names, looked.sample, looked.file, whose=True, side=True)
        roles = usual_columns.resolve_labelled(section(ColumnsConfig, {**looked.chosen}), seen)
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
    file: str | None  # the first that has rows
    sample: list[dict[str, Any]]
    names: list[str]  # of its columns
    chosen: dict[str, str]  # role -> column, as far as it is not the usual one

    @classmethod
    def at(cls, path: Path, given: UserChoices) -> _Looked:
        with said_as_options():
            root, layout = plan_of(path, ColumnsConfig(client=given.columns.get("client")))
        names = [name for part in layout.parts if part.split == "train" for name in part.files]
        files = [file_rows(root / name, layout.keys(name), layout.features) for name in names]
        file, sample = None, list[dict[str, Any]]()
        for each in files:
            if sample := [row.values for row in islice(each, SAMPLE) if isinstance(row, Row)]:
                file = each.where
                break
        names = list(dict.fromkeys(name for values in sample for name in values))
        return cls(path, given, layout, files, file, sample, names, dict(given.columns))

    def divided(self, roles: Mapping[str, str]) -> tuple[dict[str, str], PartitionConfig, str]:
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
                f"{self.file}: no column names the clients among {listed(self.names)}; give --client "
                "COLUMN, or --clients N to split the rows at random among N clients"
            )
        how = f"by the column {found[0]} ({found[1]:,} values); --client chooses another"
        return {**self.chosen, "client": found[0]}, PartitionConfig(), how
