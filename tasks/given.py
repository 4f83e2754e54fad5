"""Data that a Python program has in memory: data frames, `datasets` data sets and lists, of one client each or of all.

`{"north": frame}`, `{"north": {"train": rows, "test": rows}}`, or one table whose rows name their client. A row is a
dict such as {"question": "Which ward?", "answer": "Burns."}, a pair ("Which ward?", "Burns."), a conversation, a text,
or a picture with its label. What columns mean is found out as of files (`collected.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from llm_fed.basics.errors import UserError, listed
from llm_fed.rows.columns import USUAL_NAMES
from llm_fed.rows.layout import split_of
from llm_fed.rows.objects import FORMS, object_rows, rows_of
from llm_fed.rows.pictures import Gallery, decoded
from llm_fed.settings.config import TaskConfig
from llm_fed.settings.object_contents import digest
from llm_fed.settings.objects import named
from llm_fed.tasks import images
from llm_fed.tasks.collected import Collected
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.examples import Scheme

NAMES = {False: named("data"), True: named("pictures")}  # in a configuration, by `has_pictures`
_IMAGES = ("image", "img", "picture", "pixels", "x")
_LABELS = ("label", "labels", "fine_label", "class", "y", "target")


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
    """Whose the tables in an object are. UserError: there is none."""
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
    row = next((row for table in tables_of(data) for row in rows_of(table.rows, table.where)), None)
    parts = row.values() if isinstance(row, Mapping) else row if isinstance(row, tuple | list) else ()
    return any(isinstance(part, Image.Image | Tensor) or getattr(part, "ndim", 0) > 1 for part in parts)


def pictures(data: Any, config: TaskConfig, seed: int) -> TaskData:
    """The natural clients of an object of pictures, as of the task `images`."""
    everybody = replace(config, name="data", groups=None, clients=None)
    gallery = gallery_of(tables_of(data), config.columns.client)
    return images.of_gallery(gallery, images.SOURCES["images"], everybody, seed)


def collect(data: Any, config: TaskConfig, scheme: type[Scheme]) -> Collected:
    """The rows of an object, as Examples of that kind of `scheme`; see `files.from_files`."""
    collected = Collected(config, "data", scheme=scheme)
    for table in tables_of(data):
        if table.client is not None:
            collected.name(table.client)
        if table.client is None or next(iter(rows_of(table.rows, table.where)), None) is not None:
            collected.add(table.client, table.split, [object_rows(table.where, table.rows)], named=bool(table.key))
    return collected


def checksums(data: Any) -> dict[str, str]:
    """By client and split, the SHA-256 of the rows as they are."""
    return {table.where: digest([*rows_of(table.rows, table.where)]) for table in tables_of(data)}


def gallery_of(tables: Sequence[GivenTable], column: str | None) -> Gallery:
    """The pictures of objects, uint8, or the numbers of float tensors as they are. `column`: that names the client of a
    row of all clients. UserError: a row has no picture, or no label that is a class."""
    rows = [
        (table.client, table.split, f"{table.where}[{number}]", row)
        for table in tables
        for number, row in enumerate(rows_of(table.rows, table.where))
    ]
    images, labels = zip(*(_image_and_label(row, at) for _, _, at, row in rows), strict=True)
    texts = tuple(sorted({label for label in labels if isinstance(label, str)}))
    declared = (object_rows(table.where, table.rows).features.get(name) for table in tables for name in _LABELS)
    named = (each["names"] for each in declared if isinstance(each, dict) and each.get("names"))
    names = tuple(map(str, next(named, texts))) or None
    positions = [_place(label, names, at) for label, (_, _, at, _) in zip(labels, rows, strict=True)]

    def decode(indices: np.ndarray, size: int | None) -> Tensor:
        pixels = [_pixels(images[index], size, rows[index][2]) for index in indices.tolist()]
        if len(shapes := {(each.dtype, each.shape) for each in pixels}) > 1:
            sizes = listed(sorted("x".join(map(str, shape)) for _, shape in shapes), 3)
            raise UserError(f"the pictures have different shapes ({sizes}); set task.image_size, or give all the same")
        return torch.stack(pixels)

    owners = [row.get(column) if column is not None and isinstance(row, Mapping) else "all" for *_, row in rows]
    clients = [str(owner) if client is None else client for (client, *_), owner in zip(rows, owners, strict=True)]
    return Gallery("data=", np.array(positions, np.int64), [each[1] for each in rows], None, clients, names, decode)


def _place(label: Any, names: tuple[str, ...] | None, where: str) -> int:
    """The number of a class."""
    if isinstance(label, str):
        if names is None or label not in names:
            raise UserError(f"{where}: the label {label!r} is none of {', '.join(names or ())}; correct it")
        return names.index(label)
    number = label.item() if hasattr(label, "item") else label
    if not isinstance(number, int) or number < 0 or (names and number >= len(names)):
        raise UserError(f"{where}: the label is {label!r:.40}; it must be a name, or a class's number from 0 on")
    return number


def _image_and_label(row: Any, where: str) -> tuple[Any, Any]:
    if isinstance(row, Mapping):
        image, label = (next((row[name] for name in known if name in row), None) for known in (_IMAGES, _LABELS))
        if image is None or label is None:
            raise UserError(f"{where} has the columns {', '.join(row)}; a picture's row has an image and a label")
        return image, label
    if len(row) != 2:
        raise UserError(f"{where} has {len(row)} parts; a picture's row is a pair of an image and its label")
    return row[0], row[1]


def _pixels(image: Any, size: int | None, where: str) -> Tensor:
    if isinstance(image, Image.Image):
        return decoded([image], 1, size, where)[0]
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if pixels.ndim == 2 and not pixels.is_floating_point():
        pixels = pixels.unsqueeze(0)
    elif pixels.ndim == 3 and not isinstance(image, Tensor) and pixels.shape[-1] in (1, 3):  # NumPy's order
        pixels = pixels.permute(2, 0, 1).contiguous()
    if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
        raise UserError(f"{where}: the picture is {pixels.dtype}; give uint8, or the floats that your model takes")
    return pixels
