"""The task `files`: a user's own examples, from files of any usual form or from a Hub data set; and what tasks of
published data share, a local folder with a folder per client and seeded draws of a fixed size.

`task.path` is a folder in any of the forms of `layout.py`, one file, or `hf://owner/name`, a Hub data set, which is
read like one file with its splits (not yet run against the Hub). Whose a row is, names of files and folders say, or a
column (`task.columns.client`), or `task.partition` makes clients of all rows.

A row of `clinic-a/train.jsonl.gz`, of which `examples.py` has the other forms:
{"instruction": "Which ward?", "input": "Fractured wrist.", "output": "surgery"}
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from llm_fed.basics.errors import UserError, require
from llm_fed.basics.rng import derive
from llm_fed.rows import Row, declared, file_rows, formats, hub_data, layout, part_rows, rows_at_hand
from llm_fed.rows.layout import FolderLayout, Part, natural_order, split_of
from llm_fed.settings import paths
from llm_fed.settings.config import LIKELIHOOD, PREFERENCE, ColumnsConfig, TaskConfig
from llm_fed.tasks.collected import ALL, Collected
from llm_fed.tasks.common import ClientData, Example, Item, TaskData
from llm_fed.tasks.examples import Scheme

METRIC = "rouge1"
# Reads the rows of a task as Examples of a kind of scheme: `from_files`, or `given.collect` of an object.
Collect: TypeAlias = Callable[[TaskConfig, type[Scheme]], Collected]
log = logging.getLogger(__name__)


def from_files(config: TaskConfig, scheme: type[Scheme]) -> Collected:
    """The rows that `task.path` has, as Examples of that kind of `scheme`."""
    if config.path is None:
        raise UserError(f"task.path is not set; the task `{config.name}` needs a folder, a file, or hf://owner/name")
    if hub := paths.hub_id("task.path", config.path):
        collected, splits = Collected(config, config.path, scheme=scheme), hub_data(hub)
        if not any(map(split_of, splits)) and len(splits) > 1:
            raise UserError(
                f"the Hub data set {hub!r} has no train split, but {', '.join(splits)}; give a folder with its files"
            )
        for name, rows in splits.items():
            if split := split_of(name) or ("train" if len(splits) == 1 else None):
                collected.add(None, split, [part_rows(f"{hub} ({name})", rows)])
            else:
                collected.reading.files.append(f"split {name!r}")
        return collected
    path = paths.local("task.path", config.path)
    root, plan = plan_of(path, config.columns)
    collected = Collected(config, str(path), f"{root}/", scheme)
    named = {part.client for part in plan.parts if part.client}
    left = {name for name in named if not collected.requested(collected.id(name))}
    collected.reading.files += [name for name in plan.unused if name.partition("/")[0] not in left]
    in_folders = any(part.client and "/" in name for part in plan.parts for name in part.files)
    for name in plan.unused if in_folders else ():
        if name.find("/") == len(name) - 1:  # a client whose folder is empty
            collected.name(name.removesuffix("/"))
    for part in plan.parts:
        sources = (file_rows(root / name, plan.keys(name), plan.features) for name in part.files)
        collected.add(part.client, part.split, sources, named=part.named)
    return collected


def load(config: TaskConfig, seed: int, collect: Collect = from_files) -> TaskData:
    """The natural clients: one per file, folder or client id, or one "all" that a partition will divide."""
    collected = collect(config, Scheme)
    clients, reading = collected.clients(), collected.reading.checked()
    metric = PREFERENCE if "rejected" in reading.roles else METRIC
    return TaskData("files", LIKELIHOOD if reading.texts else metric, clients, reading=reading)


def plan_of(path: Path, wanted: ColumnsConfig) -> tuple[Path, FolderLayout]:
    """(folder, whose its files are) of a path as `load` takes it; UserError for another, and as in `layout.plan`."""
    if path.is_file():
        return path.parent, FolderLayout((Part(None, "train", (path.name,), named=False),))
    if not path.is_dir():
        raise UserError(f"task.path={str(path)!r} is neither a file nor a folder; give one of these")
    features, said = declared.of_readme(path) if (path / declared.README).is_file() else ({}, [])
    plan = layout.plan(listing(path), str(path), joined=wanted.client is not None, said=said)
    plan = replace(plan, features=features)
    if not plan.parts:
        held = f"; it holds {', '.join(plan.unused[:5])}" if plan.unused else ""
        raise UserError(f"{path} holds no client folder and no file of examples ({formats.supported()}){held}")
    return path, plan


def listing(folder: Path) -> Iterator[str]:
    """The files in a folder and below, by their paths within it, and folders without any, with a "/" behind."""
    seen = set[str]()
    for location, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(location)
        within = "" if location == str(folder) else f"{os.path.relpath(location, folder)}/".replace(os.sep, "/")
        folders[:] = [] if real in seen or within.count("/") > layout.DEEPEST + 1 else folders
        seen.add(real)
        yield from (f"{within}{name}" for name in files if os.path.isfile(os.path.join(location, name)))
        if not files and not folders and within:
            yield within


def read_client(folder: Path, client: str, config: TaskConfig) -> ClientData:
    """One client's files in a folder; UserError without training data, or for a file or row that cannot be used."""
    plan = layout.plan(listing(folder), str(folder), client=client)
    if not any(part.split == "train" for part in plan.parts):
        raise UserError(f"client {client!r} has no train file; add train.jsonl, .csv or .parquet")
    collected = Collected(replace(config, groups=None, columns=replace(config.columns, client=None)), str(folder))
    for part in plan.parts:
        collected.add(client, part.split, [file_rows(folder / name) for name in part.files], named=part.named)
    (data,) = collected.clients().values()
    collected.reading.checked()
    return data


def read_file(path: Path, config: TaskConfig) -> tuple[Example, ...]:
    """The examples of one file, whoever's they are; UserError for a file or row that cannot be used, or none."""
    collected = Collected(replace(config, groups=None, columns=replace(config.columns, client=None)), str(path))
    collected.add(ALL, "train", [file_rows(path)])
    if collected.reading.empty:
        raise UserError(f"{path} holds no example")
    (data,) = collected.clients().values()
    for label, text in collected.reading.checked().for_people().items():
        log.warning("%s: %s: %s", path, label, text)
    return tuple(data.train)


def local_folder(config: TaskConfig) -> Path:
    path = paths.local("task.path", str(config.path))
    if not path.is_dir():
        raise UserError(
            f"task.path={config.path!r} is not a folder; without task.path, {config.name} comes from the Hub"
        )
    return path


def chosen(config: TaskConfig, known: Sequence[str]) -> Sequence[str]:
    """`task.groups`, each of them known, else all that are known."""
    return [require("task.groups", name, known) for name in config.groups or ()] or known


def clients_of(
    config: TaskConfig,
    known: Sequence[str],
    from_hub: Callable[[str], ClientData],
    columns: ColumnsConfig | None = None,
    rename: Callable[[str], str] = str,
) -> list[ClientData]:
    """The clients of published data: those of `task.groups`, else all that are `known` on the Hub, or those of
    `task.path`, a folder for each, in natural order. `rename` makes a client's id of a folder's name."""
    if config.path is None:
        return [from_hub(name) for name in chosen(config, known)]
    config = replace(config, columns=columns) if columns else config
    path = local_folder(config)
    folders: dict[str, Path] = {}
    inside = [folder for folder in path.iterdir() if folder.is_dir() and folder.name[0] not in "._"]
    for folder in sorted(inside, key=lambda each: natural_order(each.name)):
        if folders.setdefault(rename(folder.name), folder) is not folder:
            raise UserError(f"{path} has two folders for the client {rename(folder.name)!r}; keep one")
    if not folders:
        raise UserError(f"{path} holds no client folder such as {known[0]}")
    return [read_client(folders[name], name, config) for name in chosen(config, list(folders))]


def of_rows(
    config: TaskConfig, client: str, rows: Mapping[str, Sequence[Row]], hub: str, columns: ColumnsConfig | None = None
) -> ClientData:
    """A client of rows of a Hub data set, by split."""
    collected = Collected(replace(config, columns=columns or config.columns), hub)
    for split, part in rows.items():
        collected.add(client, split, [rows_at_hand(f"{hub} ({split} of {client})", part)])
    return collected.clients()[client]


def of_clients(name: str, metric: str, clients: Sequence[ClientData]) -> TaskData:
    return TaskData(name, metric, {client.client: client for client in clients})


def draw(items: Sequence[Item], count: int, seed: int, *what: str) -> list[Item]:
    """`count` of the items without replacement, drawn by (seed, what); of fewer all, with a warning."""
    if len(items) < count:
        log.warning("%s: all %d examples are taken, fewer than the %d wanted", " ".join(what), len(items), count)
    chosen = np.random.default_rng(derive(seed, *what)).choice(len(items), min(count, len(items)), replace=False)
    return [items[i] for i in chosen.tolist()]


def change(client: ClientData, to: Callable[[Example], Example]) -> ClientData:
    return replace(client, **{split: tuple(map(to, examples)) for split, examples in client.splits.items()})


def reduce(client: ClientData, sizes: dict[str, int], seed: int, *what: str) -> ClientData:
    """The client with at most so many examples in the splits that `sizes` names (`draw`)."""
    drawn = {split: tuple(draw(client.splits[split], n, seed, *what, split)) for split, n in sizes.items()}
    return replace(client, **drawn)
