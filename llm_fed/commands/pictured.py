"""The same for pictures: from an npz file or a folder to a configuration of the task `images`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from llm_fed import tasks
from llm_fed.basics.errors import UserError, listed
from llm_fed.commands import init
from llm_fed.commands.budget import Budget
from llm_fed.commands.columns_of import UserChoices
from llm_fed.rows import formats, layout
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks import files
from llm_fed.tasks.common import TaskData

# The method that is proposed, and why in one line.
SHARING = "fedlora"
WHY = "federated averaging, then steps of each client's own, so that clients need not be alike"
# Models that are drawn and trained whole need many more passes than adapters. docs/init.md has the measurements.
BUDGET = Budget(passes=20, personal_share=0.2, batch=16, steps=(2, 100), rounds=(10, 100), all_of=20, cohort=(10, 50))
RATES = {"lr": 1e-3, "lr_end": 1e-4, "optimizer": "adam"}
RATES_OF_ADAPTERS = {"lr": 1e-3, "lr_end": 1e-4}
SMALL, SMALL_BASE = 40, "cnn"  # pictures up to this height and width, and the model for them
LARGE_SIDE, LARGE_BASE = 64, "resnet-18"  # for larger ones, and what they are scaled to
MOST_LABELS = 100  # that are written into the file
MOST_OPENED = 5000  # pictures whose size is looked at
_DESCRIPTIONS = re.compile(r"(?:metadata|labels?|annotations?|classes|info)\.\w+", re.IGNORECASE)


def holds_pictures(path: Path) -> bool:
    """Whether a run would read this as pictures: an npz file, or a folder with one, or with picture files and no other
    data than descriptions of these."""
    from llm_fed.rows.pictures import SUFFIXES

    if path.is_file():
        return path.suffix.lower() == ".npz"
    names = [name for name in files.listing(path) if not layout.is_silent(name)]
    if any(name.endswith(".npz") and "/" not in name for name in names):
        return True
    tables = [name for name in names if formats.kind_of(name) not in (None, "txt")]
    described = all(_DESCRIPTIONS.fullmatch(Path(name).name) for name in tables)
    return described and any(Path(name).suffix.lower() in SUFFIXES for name in names)


def draft(path: Path, given: UserChoices) -> init.Draft:
    """A configuration for pictures.

    Raises:
        UserError: they cannot be read, or nothing says whose they are.
    """
    if given.columns:
        role = next(iter(given.columns))
        raise UserError(f"{path} holds pictures, which have no columns, so --{role} would have no effect; leave it out")
    usual, image_size = _base_for(path)
    base = given.base or usual
    drawn, adapter = _kind_of(base)
    config = TaskConfig("images", str(path), image_size=image_size)
    data = tasks.load(config, 0)
    clients = _clients(path, data, given)
    if clients:
        config = TaskConfig(
            "images", str(path), image_size=image_size, partition=PartitionConfig("iid", clients=clients)
        )
        data = tasks.load(config, 0)
    findings = {
        **init.about_clients(data, ""),
        "pictures": _about_pixels(data, image_size),
        "labels": _about_labels(data),
        "answers": "one label for each picture, scored by accuracy",
    }
    return init.composed(
        given, data, init.Proposal(BUDGET, SHARING, WHY, RATES if drawn else RATES_OF_ADAPTERS),
        findings, [*init.about_sizes(data), *_about_missing(data), *_repeated(data)],
        answers=False,
        task="images",
        base=base,
        about_base="cnn and resnet-9 to resnet-152 are drawn and trained whole. A checkpoint (a ViT) gets adapters.",
        adapter=adapter,
        image_size=image_size,
        labels=list(data.labels) if len(data.labels) <= MOST_LABELS else None,
        dealt=clients,
        why_dealt="nothing says whose a picture is; kind: dirichlet deals out labels unevenly",
        about_eval="",
    )  # fmt: skip


def _base_for(path: Path) -> tuple[str, int | None]:
    """The model for pictures of this size, and what they have to be scaled to, if at all.

    Raises:
        UserError: a picture cannot be opened.
    """
    sizes = _sizes(path)
    middle = median(min(size) for size in sizes)
    alike = len(set(sizes)) == 1 and len(set(sizes[0])) == 1
    if middle <= SMALL:
        return SMALL_BASE, None if alike else 32
    return LARGE_BASE, None if alike and middle <= LARGE_SIDE else LARGE_SIDE


def _sizes(path: Path) -> list[tuple[int, int]]:
    """(height, width) of the pictures, of many of some."""
    from PIL import Image, UnidentifiedImageError

    from llm_fed.rows.pictures import SUFFIXES, read_npz

    arrays = [path] if path.is_file() else sorted(path.glob("*.npz"))
    if arrays:
        if len(arrays) > 1:
            raise UserError(f"{path} holds {arrays[0].name} and {arrays[1].name}; give one of them")
        import numpy as np

        _, _, height, width = read_npz(arrays[0]).decode(np.arange(1), None).shape
        return [(height, width)]
    names = sorted(name for name in files.listing(path) if Path(name).suffix.lower() in SUFFIXES)
    names = [name for name in names if not layout.is_silent(name)]
    sizes = []
    for name in names[:: math.ceil(len(names) / MOST_OPENED)]:
        try:
            with Image.open(path / name) as picture:
                sizes.append((picture.height, picture.width))
        except (OSError, UnidentifiedImageError, Image.DecompressionBombError, ValueError, SyntaxError) as error:
            raise UserError(f"{path / name}: this picture cannot be opened: {str(error)[:200]}; remove it") from error
    return sizes


def _kind_of(base: str) -> tuple[bool, dict[str, Any] | None]:
    """Whether a model is drawn here, and else which adapters it gets.

    Raises:
        UserError: it is neither built here nor a folder of an image model nor a name.
    """
    from llm_fed.models.images import ARCHITECTURES

    if base in ARCHITECTURES:
        return True, None
    from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING

    from llm_fed.models.loading import check_name, explain, read_settings

    folder = check_name(base, also=ARCHITECTURES)
    if Path(folder).is_dir():
        try:
            config = read_settings(folder)
        except Exception as error:  # transformers has no class for these errors
            raise UserError(explain(base, error, "an image classifier")) from error
        if type(config) not in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            built = ", ".join(ARCHITECTURES)
            raise UserError(
                f"--base {base} is a {config.model_type}, which takes no pictures, and the data are pictures; give an "
                f"image classifier, or one that is built here: {built}"
            )
    return False, {"target_modules": "all-linear"}


def _clients(path: Path, data: TaskData, given: UserChoices) -> int | None:
    """Among how many clients the pictures are dealt out; None where the data say whose they are.

    Raises:
        UserError: nothing says it.
    """
    from llm_fed.tasks.images import ALL

    if list(data.clients) != [ALL]:
        if given.clients is not None:
            raise UserError(f"--clients splits the pictures at random, but {path} says whose they are; leave it out")
        return None
    if given.clients is not None:
        return given.clients
    raise UserError(
        f"{path}: nothing says whose a picture is; give --clients N to split them at random among N clients, or put a "
        "folder for each client above those of the classes (in an npz file: an array `client`)"
    )


def _about_pixels(data: TaskData, image_size: int | None) -> str:
    pixels = next(part[0].pixels for each in data.clients.values() for part in _parts(each) if part)
    colour = "grey" if pixels.shape[0] == 1 else "colour"
    scaled = ", scaled (task.image_size)" if image_size else ""
    return f"{pixels.shape[1]} x {pixels.shape[2]} pixels, {colour}{scaled}"


def _about_labels(data: TaskData) -> str:
    counts = Counter(picture.label for each in data.clients.values() for part in _parts(each) for picture in part)
    label, most = counts.most_common(1)[0]
    share = 100 * most / counts.total()
    names = ", ".join(data.labels[:6]) + (", ..." if len(data.labels) > 6 else "")
    return f"{len(data.labels)}: {names}; the most frequent is {data.labels[label]}, {share:.0f} % of the pictures"


def _about_missing(data: TaskData) -> list[str]:
    """Labels of test pictures that their client never trains on."""
    lacking = []
    for name, client in data.clients.items():
        unseen = {picture.label for picture in client.test} - {picture.label for picture in client.train}
        if client.train and unseen:
            lacking.append(f"{name} ({listed([data.labels[label] for label in sorted(unseen)], 5)})")
    return [f"these clients are tested on labels that they do not train on: {listed(lacking)}"] if lacking else []


def _repeated(data: TaskData) -> list[str]:
    """Test pictures that are training pictures, pixel by pixel."""
    trained = {picture.digest for client in data.clients.values() for picture in client.train}
    count = sum(picture.digest in trained for client in data.clients.values() for picture in client.test)
    return [f"{count} test pictures are training pictures, too"] if count else []


def _parts(client: Any) -> tuple[Sequence[Any], ...]:
    return client.train, client.validation, client.test
