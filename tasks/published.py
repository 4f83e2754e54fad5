"""What tasks of published data share: a local folder with a folder per client, and seeded draws of a fixed size."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from llm_fed.basics.errors import UserError, require
from llm_fed.basics.rng import derive
from llm_fed.rows.layout import natural_order
from llm_fed.settings import paths
from llm_fed.settings.config import TaskConfig
from llm_fed.tasks.common import ClientData, Example
from llm_fed.tasks.files import read_client

Item = TypeVar("Item")
log = logging.getLogger(__name__)


def local_folder(config: TaskConfig) -> Path:
    path = paths.local("task.path", str(config.path))
    if not path.is_dir():
        raise UserError(
            f"task.path={config.path!r} is not a folder; without task.path, {config.name} comes from the Hub"
        )
    return path


def chosen(config: TaskConfig, known: Sequence[str], default: Sequence[str] | None = None) -> Sequence[str]:
    """`task.groups`, each of them known, else the default ones, else all that are known."""
    groups = [require("task.groups", name, known) for name in config.groups or ()]
    return groups or default or known


def local_clients(config: TaskConfig, example: str, rename: Callable[[str], str] = str) -> list[ClientData]:
    """The clients of `task.path`, a folder for each, such as `example`: those of `task.groups`, else all in natural
    order. `rename` makes a client's id of a folder's name."""
    path = local_folder(config)
    folders: dict[str, Path] = {}
    for folder in sorted(path.iterdir(), key=lambda each: natural_order(each.name)):
        if not folder.is_dir() or folder.name[0] in "._":
            continue
        name = rename(folder.name)
        if name in folders:
            raise UserError(f"{path} has two folders for the client {name!r}; keep one")
        folders[name] = folder
    if not folders:
        raise UserError(f"{path} holds no client folder such as {example}")
    return [read_client(folders[name], name, config) for name in chosen(config, list(folders))]


def draw(items: Sequence[Item], count: int, seed: int, *what: str) -> list[Item]:
    """`count` of the items without replacement, drawn by (seed, what); of fewer all, with a warning."""
    if len(items) < count:
        log.warning("%s: all %d examples are taken, fewer than the %d wanted", " ".join(what), len(items), count)
    chosen = np.random.default_rng(derive(seed, *what)).choice(len(items), min(count, len(items)), replace=False)
    return [items[i] for i in chosen.tolist()]


def change(client: ClientData, to: Callable[[Example], Example]) -> ClientData:
    splits = ("train", "validation", "test")
    return dataclasses.replace(client, **{split: tuple(map(to, getattr(client, split))) for split in splits})


def reduce(client: ClientData, sizes: dict[str, int], seed: int, *what: str) -> ClientData:
    """The client with at most so many examples in the splits that `sizes` names (`draw`)."""
    drawn = {split: tuple(draw(getattr(client, split), n, seed, *what, split)) for split, n in sizes.items()}
    return dataclasses.replace(client, **drawn)
