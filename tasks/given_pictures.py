"""Rows that are a picture with its label, as a Python program has them: {"image": PIL, "label": 3}, or a pair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.tasks.common import Picture

_IMAGES = ("image", "img", "picture", "pixels", "x")
_LABELS = ("label", "labels", "fine_label", "class", "y", "target")


def is_picture(row: Any) -> bool:
    """Whether a row holds pixels."""
    parts = row.values() if isinstance(row, Mapping) else row if isinstance(row, tuple | list) else ()
    return any(isinstance(part, Image.Image | Tensor) or getattr(part, "ndim", 0) > 1 for part in parts)


class Labels:
    """The classes of a federation, by the order of which labels are numbers.

    Args:
        names: as configured; None: those of a `datasets` feature, else as many as the largest number says, or the texts
            in their order.
    """

    def __init__(self, names: tuple[str, ...] | None, data: Any):
        self._fixed = names or _named_by(data)
        self._numbers: set[int] = set()
        self._texts: tuple[str, ...] = () if self._fixed else tuple(sorted(_texts_in(data)))

    @property
    def names(self) -> tuple[str, ...]:
        return self._fixed or self._texts or tuple(map(str, range(max(self._numbers, default=-1) + 1)))

    def number(self, label: Any, where: str) -> int:
        """The place of a label.

        Raises:
            UserError: it is none of the classes.
        """
        known = self._fixed or self._texts
        if isinstance(label, str):
            if label not in known:
                raise UserError(f"{where}: the label {label!r} is none of {', '.join(known) or 'the numbers before'}")
            return known.index(label)
        number = label.item() if hasattr(label, "item") else label
        if not isinstance(number, int) or number < 0 or (known and number >= len(known)):
            raise UserError(f"{where}: the label is {label!r:.40}; it must be a name, or a class's number from 0 on")
        self._numbers.add(number)
        return number


def picture(row: Any, labels: Labels, size: int | None, where: str) -> Picture:
    """The picture of a row, (C, H, W): uint8, or the numbers of a float tensor as they are.

    Raises:
        UserError: it has no picture, or no label.
    """
    image, label = _image_and_label(row, where)
    number = labels.number(label, where)
    return Picture(_pixels(image, size, where), number, str(number))


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


def _named_by(data: Any) -> tuple[str, ...] | None:
    """The names that the features of a `datasets` data set give its labels."""
    tables = list(data.values()) if isinstance(data, Mapping) else [data]
    tables += [part for table in tables if isinstance(table, Mapping) for part in table.values()]
    for table in tables:
        features = getattr(table, "features", None) or {}
        names = next((getattr(features[each], "names", None) for each in _LABELS if each in features), None)
        if names:
            return tuple(names)
    return None


def _texts_in(data: Any) -> set[str]:
    from llm_fed.tasks.given import parts_of, rows_of

    rows = (row for _, _, _, table in parts_of(data) for row in rows_of(table, "data"))
    return {label for row in rows if isinstance(label := _image_and_label(row, "data")[1], str)}
