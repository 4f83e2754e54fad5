"""Labelled pictures of an npz file, a folder of image files, or a `datasets` data set; decoded when requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from numpy.lib.npyio import NpzFile
from PIL import Image as PIL

from llm_fed.basics.errors import UserError
from llm_fed.rows.columns import check_column
from llm_fed.rows.formats import check_archive
from llm_fed.rows.layout import SPLIT_NAMES, keys_of, natural_order

if TYPE_CHECKING:
    from datasets import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LAYOUTS = ((), ("client",), ("split",), ("client", "split"))  # of the folders above a class's
GREY = ("1", "L", "LA")  # PIL's modes of a picture without colours
NPZ_KEYS = "x_train, y_train, x_test and y_test (or x and y; test, client or domain, coarse_of_fine and classes if any)"

MOST_CLASSES = 100_000  # of labels without names: ImageNet-21k has 21,841
Decode = Callable[[np.ndarray, int | None], torch.Tensor]


@dataclass(frozen=True)
class Gallery:
    """What is known of pictures before they are decoded; every sequence has one entry per picture."""

    where: str  # the file, folder or data set, for messages
    labels: np.ndarray  # (N,) integers
    splits: Sequence[str]  # train | validation | test
    groups: Sequence[str | float] | None  # the fine class
    clients: Sequence[str | float] | None  # the natural client
    classes: tuple[str, ...] | None  # names by label, where the data has them
    decode: Decode  # (indices, height and width or None) -> (n, C, H, W) uint8


def read_npz(path: Path) -> Gallery:
    """Arrays as Keras and others save them: NPZ_KEYS, images (N, H, W) or (N, H, W, 1 or 3) uint8, labels (N,)."""
    try:
        with np.load(path, allow_pickle=False) as file:
            _check_sizes(path, file)
            return _of_arrays(path, {key: file[key] for key in file.files})
    except UserError:
        raise
    except Exception as error:  # of any kind, as of damaged archives
        first_line = str(error).partition("\n")[0]
        raise UserError(f"{path} cannot be read as pictures: {first_line}; an npz file holds {NPZ_KEYS}") from error


def _of_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> Gallery:
    """ValueError or IndexError: they are no pictures with labels."""
    one = "x" in arrays
    pairs = [("x", "y")] if one else [("x_train", "y_train"), ("x_test", "y_test")]
    if missing := [key for pair in pairs for key in pair if key not in arrays]:
        raise ValueError(f"it lacks {' and '.join(missing)}")
    for x, y in pairs:
        _check_pair(x, arrays[x], y, arrays[y])
        _check_most(arrays[y], f"{path}: {y}")
    pixels = np.concatenate([arrays[x] for x, _ in pairs])
    labels = np.concatenate([arrays[y] for _, y in pairs]).astype(np.int64)
    count = len(labels)
    for key in ("test", "client", "domain"):
        if key in arrays and arrays[key].shape != (count,):
            raise ValueError(f"{key} is of shape {arrays[key].shape}, with {count} pictures")
    held_out = arrays.get("test", np.zeros(count)) if one else np.arange(count) >= len(arrays["y_train"])
    clients, groups = arrays.get("client"), None
    if clients is None and "domain" in arrays:
        clients = _named_by("domains", arrays, arrays["domain"])
    if "coarse_of_fine" in arrays:
        groups, labels = labels, _named_by("coarse_of_fine", arrays, labels).astype(np.int64, casting="same_kind")
    classes = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays else None

    def decode(indices: np.ndarray, size: int | None) -> torch.Tensor:
        chosen = pixels if len(indices) == len(pixels) else pixels[indices]
        if size is not None and chosen.shape[1:3] != (size, size):
            flat = chosen[..., 0] if chosen.shape[3:] == (1,) else chosen
            return decoded(map(PIL.fromarray, flat), len(flat), size, str(path))
        batch = torch.from_numpy(chosen)
        return batch.unsqueeze(1) if batch.ndim == 3 else batch.permute(0, 3, 1, 2).contiguous()

    splits = ["test" if held else "train" for held in held_out.tolist()]
    of_client, of_group = (None if each is None else each.tolist() for each in (clients, groups))
    return Gallery(str(path), labels, splits, of_group, of_client, classes, decode)


def _named_by(key: str, arrays: Mapping[str, np.ndarray], indices: np.ndarray) -> np.ndarray:
    """The entries of an array, if it is there, that others index."""
    if key not in arrays:
        return indices
    if indices.min() < 0 or indices.max() >= len(arrays[key]):
        raise IndexError(f"labels or domains do not index the {len(arrays[key])} entries of {key}")
    named: np.ndarray = arrays[key][indices]
    return named


def _check_sizes(path: Path, file: NpzFile) -> None:
    """UserError for arrays that do not fit into memory, by what the file says, before anything is decoded."""
    assert file.zip is not None  # it is open
    check_archive(path, file.zip)
    decoded, most = sum(member.file_size for member in file.zip.infolist()), psutil.virtual_memory().total
    if decoded > most:
        raise UserError(
            f"{path} says that its arrays take {decoded:,} bytes, and this machine has {most:,}; give a folder of "
            "image files with task.image_size, or fewer pictures"
        )


def _check_pair(x: str, pixels: np.ndarray, y: str, labels: np.ndarray) -> None:
    shaped = pixels.ndim == 3 or (pixels.ndim == 4 and pixels.shape[-1] in (1, 3))
    if pixels.dtype != np.uint8 or not shaped or 0 in pixels.shape:
        raise ValueError(f"{x} is {pixels.dtype} of shape {pixels.shape}, not uint8 of (N, H, W) or (N, H, W, 1 or 3)")
    if labels.shape != (len(pixels),) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"{y} is {labels.dtype} of shape {labels.shape}, not an integer for each of {len(pixels)} pictures"
        )


def _check_most(labels: np.ndarray, where: str) -> None:
    if len(labels) and labels.max() >= MOST_CLASSES:
        most = f"{MOST_CLASSES - 1:,}"
        raise UserError(f"{where} holds the label {labels.max()}; a label is the number of a class, at most {most}")


def read_folder(folder: Path) -> Gallery:
    """Image files in CLASS/, CLIENT/CLASS/, train/CLASS/ or CLIENT/train/CLASS/, and test/ and validation/ likewise; a
    folder may have a key (`site=north`)."""
    from datasets import Dataset

    files = [file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")]
    locations = sorted(
        (file.relative_to(folder).parts for file in files), key=lambda parts: [*map(natural_order, parts)]
    )
    paths = [str(folder.joinpath(*parts)) for parts in locations]
    locations = [
        (*(next(iter(keys_of(f"{part}/").values()), part) for part in parts[:-1]), parts[-1]) for parts in locations
    ]
    split_of = {name: split for split, names in SPLIT_NAMES.items() for name in names}
    above = [tuple("split" if part in split_of else "client" for part in parts[:-2]) for parts in locations]
    if len(set(above)) != 1 or above[0] not in LAYOUTS or any(len(parts) < 2 for parts in locations):
        lies = (
            f"e.g. {Path(*locations[0])} and {Path(*locations[-1])}" if locations else f"none ({', '.join(SUFFIXES)})"
        )
        raise UserError(
            f"{folder}: pictures found: {lies}; all must lie in CLASS/, CLIENT/CLASS/, train/CLASS/ and test/CLASS/, "
            "or CLIENT/train/CLASS/ and CLIENT/test/CLASS/"
        )
    layout = above[0]
    classes = sorted({parts[-2] for parts in locations})
    index = {name: i for i, name in enumerate(classes)}
    return Gallery(
        str(folder),
        np.array([index[parts[-2]] for parts in locations], np.int64),
        [split_of[parts[-3]] if "split" in layout else "train" for parts in locations],
        None,
        [parts[0] for parts in locations] if "client" in layout else None,
        tuple(classes),
        _decoder(Dataset.from_dict({"image": paths}), "image", str(folder)),
    )


def read_dataset(parts: Sequence[tuple[str, Dataset]], columns: Mapping[str, str], where: str) -> Gallery:
    """A data set in parts, each with its split; `columns` names those of image, label, and group or client if any."""
    from datasets import ClassLabel, concatenate_datasets

    splits = [split for split, part in parts for _ in range(len(part))]
    try:
        data = concatenate_datasets([part for _, part in parts])
    except ValueError as error:
        raise UserError(f"{where}: its splits have different columns: {str(error)[:200]}") from error
    for role, column in columns.items():
        check_column(f"the {role}", column, data.column_names, where)
    named = data.features[columns["label"]]
    values = data[columns["label"]][:]
    try:
        labels = np.array(values, np.int64)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{where}: the column {columns['label']!r} does not hold a class number in each row") from error
    if not isinstance(named, ClassLabel):
        _check_most(labels, f"{where}: the column {columns['label']!r}")
    return Gallery(
        where,
        labels,
        splits,
        data[columns["group"]][:] if "group" in columns else None,
        data[columns["client"]][:] if "client" in columns else None,
        tuple(named.names) if isinstance(named, ClassLabel) else None,
        _decoder(data, columns["image"], where),
    )


def _decoder(data: Dataset, column: str, where: str) -> Decode:
    from datasets import Image

    data = data.select_columns(column).cast_column(column, Image())

    def decode(indices: np.ndarray, size: int | None) -> torch.Tensor:
        try:
            return decoded((row[column] for row in data.select(indices.tolist())), len(indices), size, where)  # type: ignore[call-overload]
        except (OSError, ValueError, SyntaxError, PIL.DecompressionBombError) as error:  # as PIL raises of damaged ones
            raise UserError(f"{where}: a picture cannot be read: {str(error)[:200]}") from error

    return decode


def decoded(images: Iterable[PIL.Image], count: int, size: int | None, where: str) -> torch.Tensor:
    """`count` pictures as one tensor (count, C, H, W): C = 1 where all are grey, else 3. UserError where the sizes
    differ and `size` is None, or a picture has more than 8 bits a channel."""
    pixels, grey = np.empty((0, 0, 0, 3), np.uint8), True
    for i, image in enumerate(images):
        if image.mode[0] in "IF":
            raise UserError(f"{where}: a picture of mode {image.mode} has more than 8 bits a channel; convert it")
        grey = grey and image.mode in GREY
        image = image.convert("RGB")
        if size is not None and image.size != (size, size):
            image = image.resize((size, size), PIL.Resampling.BILINEAR)
        picture = np.asarray(image)
        if i == 0:
            pixels = np.empty((count, *picture.shape), np.uint8)
        if picture.shape != pixels.shape[1:]:
            raise UserError(
                f"{where}: pictures of {pixels.shape[1]}x{pixels.shape[2]} and of {picture.shape[0]}x"
                f"{picture.shape[1]} pixels; set task.image_size"
            )
        pixels[i] = picture
    batch = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    return (batch[:, :1] if grey else batch).contiguous()
