"""Rows that are a picture with its label, as a Python program has them: {"image": PIL, "label": 3}, or a pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from llm_fed.basics.errors import UserError, listed
from llm_fed.rows.objects import classes_of, rows_of
from llm_fed.rows.pictures import Gallery

if TYPE_CHECKING:
    from llm_fed.tasks.given import GivenTable

_IMAGES = ("image", "img", "picture", "pixels", "x")
_LABELS = ("label", "labels", "fine_label", "class", "y", "target")


def is_picture(row: Any) -> bool:
    """Whether a row holds pixels."""
    parts = row.values() if isinstance(row, Mapping) else row if isinstance(row, tuple | list) else ()
    return any(isinstance(part, Image.Image | Tensor) or getattr(part, "ndim", 0) > 1 for part in parts)


def gallery_of(tables: Sequence[GivenTable], column: str | None) -> Gallery:
    """The pictures of objects, uint8, or the numbers of float tensors as they are.

    Args:
        column: that names the client of a row of all clients.

    Raises:
        UserError: a row has no picture, or no label that is a class.
    """
    rows = [
        (table.client, table.split, f"{table.where}[{number}]", row)
        for table in tables
        for number, row in enumerate(rows_of(table.rows, table.where))
    ]
    images, labels = zip(*(_image_and_label(row, at) for _, _, at, row in rows), strict=True)
    texts = tuple(sorted({label for label in labels if isinstance(label, str)}))
    names = next(_declared(table.rows for table in tables), texts) or None
    places = [_place(label, names, at) for label, (_, _, at, _) in zip(labels, rows, strict=True)]

    def decode(indices: np.ndarray, size: int | None) -> Tensor:
        pixels = [_pixels(images[place], size, rows[place][2]) for place in indices.tolist()]
        if len(shapes := {(each.dtype, each.shape) for each in pixels}) > 1:
            sizes = listed(sorted("x".join(map(str, shape)) for _, shape in shapes), 3)
            raise UserError(f"the pictures have different shapes ({sizes}); set task.image_size, or give all the same")
        return torch.stack(pixels)

    clients = [client if client is not None else _owner(row, column) for client, _, _, row in rows]
    return Gallery("data=", np.array(places, np.int64), [each[1] for each in rows], None, clients, names, decode)


def _owner(row: Any, column: str | None) -> str:
    return str(row.get(column)) if column is not None and isinstance(row, Mapping) else "all"


def _declared(tables: Iterator[Any]) -> Iterator[tuple[str, ...]]:
    """The names that the features of a `datasets` data set give its labels, or a torchvision data set its classes."""
    for table in tables:
        features = getattr(table, "features", None) or {}
        named = next((getattr(features[each], "names", None) for each in _LABELS if each in features), None)
        if names := named or classes_of(table):
            yield tuple(map(str, names))


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
        image = next((row[name] for name in _IMAGES if name in row), None)
        label = next((row[name] for name in _LABELS if name in row), None)
        if image is None or label is None:
            raise UserError(f"{where} has the columns {', '.join(row)}; a picture's row has an image and a label")
        return image, label
    if len(row) != 2:
        raise UserError(f"{where} has {len(row)} parts; a picture's row is a pair of an image and its label")
    return row[0], row[1]


def _pixels(image: Any, size: int | None, where: str) -> Tensor:
    if isinstance(image, Image.Image):
        image = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
        image = image.resize((size, size)) if size else image
        pixels = torch.from_numpy(np.array(image))
        return pixels.unsqueeze(0) if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()
    pixels = image if isinstance(image, Tensor) else torch.from_numpy(np.array(image))
    if pixels.ndim == 2 and not pixels.is_floating_point():
        pixels = pixels.unsqueeze(0)
    elif pixels.ndim == 3 and not isinstance(image, Tensor) and pixels.shape[-1] in (1, 3):  # NumPy's order
        pixels = pixels.permute(2, 0, 1).contiguous()
    if pixels.dtype != torch.uint8 and not pixels.is_floating_point():
        raise UserError(f"{where}: the picture is {pixels.dtype}; give uint8, or the floats that your model takes")
    return pixels
