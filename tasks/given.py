"""Data that a Python program has in memory: data frames, `datasets` data sets and lists, of one client each or of all.

`{"north": frame}`, `{"north": {"train": rows, "test": rows}}`, or one table whose rows name their client. A row is a
dict such as {"question": "Which ward?", "answer": "Burns."}, a pair ("Which ward?", "Burns."), a conversation, a text,
or a picture with its label. What columns mean is found out as of files (`collected.py`).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from llm_fed.basics.errors import UserError, listed, one_line
from llm_fed.rows import BadRow, Row, Source, class_names, with_names
from llm_fed.rows.columns import USUAL_NAMES
from llm_fed.rows.layout import split_of
from llm_fed.settings.config import LIKELIHOOD, TaskConfig
from llm_fed.settings.objects import named
from llm_fed.tasks.collected import Collected
from llm_fed.tasks.common import ClientData, Picture, TaskData
from llm_fed.tasks.given_pictures import Labels, is_picture, picture
from llm_fed.tasks.labelled import Labelled, Numbered, classes_of, numbers_of

FORMS = "a data frame, a data set of the library datasets, or a list of rows (dicts, pairs, texts)"
NAMES = {False: named("data"), True: named("pictures")}  # in a configuration, by `has_pictures`
LABELLED = {"classification": (Labelled, classes_of), "regression": (Numbered, numbers_of)}  # by what task.name asks
_SETTING = re.compile(r"\bset ([a-z]+(?:\.[a-z_]+)+=[^\s;,()]+)")
Of = TypeVar("Of", bound=Collected)
Parts = list[tuple[str | None, str, bool, Any]]  # client, split, whether the split is said, and the table


class ObjectRows(Source):
    """The rows of one object, numbered from 0 as Python does."""

    def __init__(self, where: str, table: Any):
        super().__init__(where)
        self._table = table
        if hasattr(table, "to_dict") and hasattr(table, "columns"):  # of pandas, whose dicts keep the last of two
            self.note_names([str(name) for name in table.columns])

    def __iter__(self) -> Iterator[Row | BadRow]:
        classes = class_names(self._table) if _is_data_set(self._table) else {}
        for number, row in enumerate(rows_of(self._table, self.where)):
            where = f"{self.where}[{number}]"
            yield with_names(where, _as_mapping(row, where), classes)


def parts_of(data: Any) -> Parts:
    """Whose the tables in an object are.

    Raises:
        UserError: there is none.
    """
    if not isinstance(data, Mapping):
        return [(None, "train", False, data)]
    if not data:
        raise UserError("data= is empty; give {client: rows}")
    texts = all(isinstance(own, list) and isinstance((own or [0])[0], str) for own in data.values())
    if texts and {*data} & {*USUAL_NAMES["prompt"], *USUAL_NAMES["answer"]}:
        raise UserError(f"data= is a dict of the columns {listed([*map(str, data)])}; give {{client: rows}}")
    if all(isinstance(key, str) and split_of(key) for key in data):  # of all clients together
        return [(None, _split(key), True, table) for key, table in data.items()]
    parts: Parts = []
    for client, own in data.items():
        if isinstance(own, Mapping):
            if unknown := [key for key in own if not (isinstance(key, str) and split_of(key))]:
                raise UserError(
                    f"data[{client!r}] has the key {unknown[0]!r}; a client's rows are {FORMS}, or a dict of such with "
                    "the keys train, validation and test"
                )
            parts += [(str(client), _split(key), True, table) for key, table in own.items()]
        else:
            parts.append((str(client), "train", False, own))
    return parts


def has_pictures(data: Any) -> bool:
    """Whether the first row is a picture."""
    for client, split, said, table in parts_of(data):
        for row in rows_of(table, _where(client, split if said else "")):
            return is_picture(row)
    return False


def load(data: Any, config: TaskConfig, seed: int) -> TaskData:
    """The natural clients of an object, as of the task `files`."""
    if config.path is not None:
        raise UserError(f"task.path={config.path!r} names files, but data= gives the data; leave one of the two out")
    if has_pictures(data):
        return _pictures(data, config)
    collected = _collected(data, Collected(config, "data"))
    clients, reading = collected.clients(), collected.reading.checked()
    return TaskData("data", LIKELIHOOD if reading.texts else "rouge1", clients, reading=reading)


def load_labelled(data: Any, name: str, config: TaskConfig, seed: int) -> TaskData:
    """The natural clients of an object, as of a task of LABELLED."""
    kind, task_of = LABELLED[name]
    return task_of(_collected(data, kind(config, "data")))


def _collected(data: Any, collected: Of) -> Of:
    for client, split, said, table in parts_of(data):
        where = _where(client, split if said else "")
        if client is not None:
            collected.name(client)
        if client is None or next(iter(rows_of(table, where)), None) is not None:
            try:
                collected.add(client, split, [ObjectRows(where, table)], named=said)
            except UserError as error:  # in Python a setting is a text
                raise UserError(_SETTING.sub(r'give the setting "\1"', str(error))) from error
    return collected


def checksums(data: Any) -> dict[str, str]:
    """By client and split, the SHA-256 of the rows as they are."""
    digests = {}
    for client, split, said, table in parts_of(data):
        where, digest = _where(client, split if said else ""), hashlib.sha256()
        for row in rows_of(table, where):
            for part in row.items() if isinstance(row, Mapping) else row if isinstance(row, list | tuple) else [row]:
                digest.update(repr(_plain(part)).encode("utf-8", "surrogatepass"))
        digests[where] = digest.hexdigest()
    return digests


def rows_of(table: Any, where: str) -> Iterable[Any]:
    """The rows of an object, as dicts where it has columns.

    Raises:
        UserError: it has no rows.
    """
    if _is_data_set(table):
        return _as_it_gives(table, where)
    if hasattr(table, "iloc") and not hasattr(table, "columns"):  # a Series, in which a number is a label of its index
        return table.tolist()
    for method in ("to_pylist", "to_dicts"):  # of Arrow and Polars
        if callable(getattr(table, method, None)):
            return getattr(table, method)()
    if hasattr(table, "columns") and callable(getattr(table, "to_dict", None)):  # of pandas
        return table.to_dict("records")
    if hasattr(table, "__getitem__") and hasattr(table, "__len__") and not isinstance(table, str | bytes | Mapping):
        return (table[place] for place in range(len(table)))  # a list, or torch's Dataset
    if isinstance(table, Iterable) and not isinstance(table, str | bytes | Mapping) and iter(table) is not table:
        return table
    raise UserError(f"{where} is {type(table).__name__}; give {FORMS}")


def _is_data_set(table: Any) -> bool:
    """Whether it is one of the library datasets."""
    return hasattr(table, "with_format") and hasattr(table, "features")


def _as_it_gives(table: Any, where: str) -> Iterator[Any]:
    """The rows that a data set gives its user: transformed where it has a transform, without the columns that its
    format hides, and without tensors.

    Raises:
        UserError: a transform fails, and at which row.
    """
    form = getattr(table, "format", None) or {}  # one that is streamed has none
    if form and form["type"] != "custom":
        table = table.with_format(None, columns=form["columns"])
    elif not form:
        table = table.with_format(None)
    rows, number = iter(table), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # the user's own function
            said = one_line(f"{type(error).__name__}: {error}")
            raise UserError(f"{where}[{number}]: the data set fails to give this row: {said}") from error
        yield row
        number += 1


def _where(client: str | None, split: str) -> str:
    return "data" + (f"[{client!r}]" if client is not None else "") + (f"[{split!r}]" if split else "")


def _split(key: str) -> str:
    split = split_of(key)
    assert split is not None  # the caller has asked
    return split


def _as_mapping(row: Any, where: str) -> dict[str, Any]:
    if isinstance(row, Mapping):
        return {str(key): _plain(value) for key, value in row.items()}
    if isinstance(row, str):
        return {"text": row}
    if isinstance(row, Sequence) and row and all(isinstance(turn, Mapping) for turn in row):
        return {"messages": _plain(row)}
    if isinstance(row, Sequence) and len(row) == 2:
        return {"prompt": _plain(row[0]), "answer": _plain(row[1])}
    raise UserError(f"{where} is {row!r:.60}; give a dict, a pair of prompt and answer, a list of messages, or a text")


def _plain(value: Any) -> Any:
    """A cell as a file would have it: no number of NumPy, and None for what a frame has in an empty cell."""
    if isinstance(value, float) and math.isnan(value):
        return None
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if callable(getattr(value, "tolist", None)):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _pictures(data: Any, config: TaskConfig) -> TaskData:
    """The natural clients of rows that are pictures with their labels."""
    labels = Labels(config.labels, data)
    by_client: dict[str, dict[str, list[Picture]]] = {}
    column = config.columns.client
    for client, split, said, table in parts_of(data):
        where = _where(client, split if said else "")
        for number, row in enumerate(rows_of(table, where)):
            owner = client
            if owner is None and column is not None and isinstance(row, Mapping):
                owner = str(row.get(column))
            own = by_client.setdefault(owner or "all", {"train": [], "validation": [], "test": []})
            own[split].append(picture(row, labels, config.image_size, f"{where}[{number}]"))
    shapes = {each.pixels.shape for own in by_client.values() for items in own.values() for each in items}
    if len(shapes) > 1:
        sizes = listed(sorted("x".join(map(str, shape)) for shape in shapes), 3)
        raise UserError(f"the pictures have different shapes ({sizes}); set task.image_size, or give all the same")
    clients = {name: ClientData(name, **{split: tuple(items) for split, items in own.items()})
               for name, own in by_client.items()}  # fmt: skip
    return TaskData("data", "accuracy", clients, labels.names)
