"""Data that a Python program has in memory: data frames, `datasets` data sets and lists, of one client each or of all.

`{"north": frame}`, `{"north": {"train": rows, "test": rows}}`, or one table whose rows name their client. A row is a
dict such as {"question": "Which ward?", "answer": "Burns."}, a pair ("Which ward?", "Burns."), a conversation, a text,
or a picture with its label. What columns mean is found out as of files (`collected.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from llm_fed.basics.errors import UserError, listed
from llm_fed.rows.columns import USUAL_NAMES
from llm_fed.rows.layout import split_of
from llm_fed.rows.objects import FORMS, ObjectRows, plain, rows_of
from llm_fed.settings.config import LIKELIHOOD, TaskConfig
from llm_fed.settings.objects import named
from llm_fed.tasks import images
from llm_fed.tasks.collected import Collected
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.given_pictures import gallery_of, is_picture
from llm_fed.tasks.labelled import Labelled, Numbered, classes_of, numbers_of

NAMES = {False: named("data"), True: named("pictures")}  # in a configuration, by `has_pictures`
LABELLED = {"classification": (Labelled, classes_of), "regression": (Numbered, numbers_of)}  # by what task.name asks
_SETTING = re.compile(r"\bset ([a-z]+(?:\.[a-z_]+)+=[^\s;,()]+)")
Of = TypeVar("Of", bound=Collected)


class GivenTable(NamedTuple):
    """Rows of an object that belong together."""

    client: str | None  # None: of all
    key: str  # the split as it is written there; empty: not said
    rows: Any

    @property
    def split(self) -> str:
        return split_of(self.key) or "train"

    @property
    def where(self) -> str:
        client = "" if self.client is None else f"[{self.client!r}]"
        return f"data{client}[{self.split!r}]" if self.key else f"data{client}"


def tables_of(data: Any) -> list[GivenTable]:
    """Whose the tables in an object are.

    Raises:
        UserError: there is none.
    """
    if not isinstance(data, Mapping):
        return [GivenTable(None, "", data)]
    if not data:
        raise UserError("data= is empty; give {client: rows}")
    texts = all(isinstance(own, list) and isinstance((own or [0])[0], str) for own in data.values())
    if texts and {*data} & {*USUAL_NAMES["prompt"], *USUAL_NAMES["answer"]}:
        raise UserError(f"data= is a dict of the columns {listed([*map(str, data)])}; give {{client: rows}}")
    if all(map(_is_split, data)):  # of all clients together
        return [GivenTable(None, key, rows) for key, rows in data.items()]
    tables = []
    for client, own in data.items():
        parts = own if isinstance(own, Mapping) else {"": own}
        if unknown := [key for key in parts if key != "" and not _is_split(key)]:
            raise UserError(
                f"data[{client!r}] has the key {unknown[0]!r}; a client's rows are {FORMS}, or a dict of such with "
                "the keys train, validation and test"
            )
        tables += [GivenTable(str(client), key, rows) for key, rows in parts.items()]
    return tables


def _is_split(key: Any) -> bool:
    return isinstance(key, str) and split_of(key) is not None


def has_pictures(data: Any) -> bool:
    """Whether the first row is a picture."""
    return next((is_picture(row) for table in tables_of(data) for row in rows_of(table.rows, table.where)), False)


def load(data: Any, config: TaskConfig, seed: int) -> TaskData:
    """The natural clients of an object, as of the task `files`."""
    if config.path is not None:
        raise UserError(f"task.path={config.path!r} names files, but data= gives the data; leave one of the two out")
    if has_pictures(data):
        everybody = replace(config, name="data", groups=None, clients=None)
        gallery = gallery_of(tables_of(data), config.columns.client)
        return images.of_gallery(gallery, images.SOURCES["images"], everybody, seed)
    collected = _collected(data, Collected(config, "data"))
    clients, reading = collected.clients(), collected.reading.checked()
    return TaskData("data", LIKELIHOOD if reading.texts else "rouge1", clients, reading=reading)


def load_labelled(data: Any, name: str, config: TaskConfig, seed: int) -> TaskData:
    """The natural clients of an object, as of a task of LABELLED."""
    kind, task_of = LABELLED[name]
    return task_of(_collected(data, kind(config, "data")))


def _collected(data: Any, collected: Of) -> Of:
    for table in tables_of(data):
        if table.client is not None:
            collected.name(table.client)
        if table.client is None or next(iter(rows_of(table.rows, table.where)), None) is not None:
            try:
                source = ObjectRows(table.where, table.rows)
                collected.add(table.client, table.split, [source], named=bool(table.key))
            except UserError as error:  # in Python a setting is a text
                raise UserError(_SETTING.sub(r'give the setting "\1"', str(error))) from error
    return collected


def checksums(data: Any) -> dict[str, str]:
    """By client and split, the SHA-256 of the rows as they are."""
    digests = {}
    for table in tables_of(data):
        digest = hashlib.sha256()
        for row in rows_of(table.rows, table.where):
            for part in row.items() if isinstance(row, Mapping) else row if isinstance(row, list | tuple) else [row]:
                digest.update(repr(plain(part)).encode("utf-8", "surrogatepass"))
        digests[table.where] = digest.hexdigest()
    return digests
