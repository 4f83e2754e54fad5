"""The task `files`: a user's own examples, from JSON, JSONL, CSV or Parquet files or from a Hub data set.

`task.path` is one of

- a folder with one file per client (`north.jsonl`), or with `north-train.jsonl` and `north-test.jsonl`;
- a folder with one folder per client, with `train.*`, `test.*` and `validation.*` as far as there are any;
- one file, or a folder that holds `train.*` (and `test.*`, `validation.*`) itself: `task.columns.client`
  names the column that says whose a row is, or `task.partition` makes clients of all rows;
- `hf://owner/name`, a Hub data set, read like the folder above. Not yet run against the Hub.

A row of `clinic-a/train.jsonl.gz`:
{"instruction": "Which ward?", "input": "Fractured wrist.", "output": "surgery"}

A row may also hold a conversation (`conversations.py`). `.json`, `.jsonl` and `.csv` may be gzipped. Columns
are those of `task.columns`, else the first of the usual names (`rows.USUAL_NAMES`). Where no client brings a
test split, a seeded fifth of each client's examples becomes its test split (`llm_fed.tasks.load`), with a
warning.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path

from llm_fed import datapath
from llm_fed.config import TaskConfig
from llm_fed.errors import UserError
from llm_fed.tasks.common import ClientData, TaskData
from llm_fed.tasks.rows import (
    SUFFIXES,
    FileRows,
    Row,
    check_column,
    find_columns,
    hub_rows,
    read_rows,
    text_of,
    to_example,
)
from llm_fed.tasks.stored import Store, Stored

METRIC = "rouge1"
SPLIT_NAMES = {"train": ("train",), "validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


def load(config: TaskConfig, seed: int) -> TaskData:
    """The natural clients: one per folder or client id, or one "all" that a partition will divide."""
    if config.path is None:
        raise UserError("task.path is not set; the task `files` needs a folder, a file, or hf://owner/name")
    if hub := datapath.hub_id("task.path", config.path):
        return TaskData("files", METRIC, by_column(hub_rows(hub), config, config.path))
    path = datapath.local("task.path", config.path)
    if path.is_file():
        clients = by_column({"train": FileRows(path)}, config, str(path))
    elif not path.is_dir():
        raise UserError(f"task.path={config.path!r} is neither a file nor a folder; give one of these")
    else:
        here = split_files(path)
        files = {} if here else client_files(path)
        folders = _in_folders(path)
        if (here or files) and any(folders.values()):
            one = next(iter(here.values() if here else next(iter(files.values())).values()))
            raise UserError(f"{path} holds {one.name} and client folders; keep one of the two")
        if here:
            clients = by_column({split: FileRows(file) for split, file in here.items()}, config, str(path))
        else:
            store, parts_of = Store(), files or folders
            clients = {client: read_client(parts, client, config, store) for client, parts in parts_of.items()}
    if not clients:
        raise UserError(f"{path} holds no client folder and no file of examples ({', '.join(SUFFIXES)})")
    return TaskData("files", METRIC, clients)


def training_files(path: Path) -> list[Path]:
    """The files whose rows are trained on, wherever they lie below a path as `load` takes it."""
    if path.is_file():
        return [path]
    here = split_files(path)
    parts = [here] if here else list((client_files(path) or _in_folders(path)).values())
    return [files["train"] for files in parts if "train" in files]


def _in_folders(path: Path) -> dict[str, dict[str, Path]]:
    """Client -> split -> file, of one folder per client."""
    return {folder.name: split_files(folder) for folder in client_folders(path)}


def client_folders(path: Path) -> list[Path]:
    """Folders of clients in natural order: client2 before client10."""
    folders = (each for each in path.iterdir() if each.is_dir() and each.name[0] not in "._")
    return sorted(folders, key=lambda folder: natural_order(folder.name))


def client_files(path: Path) -> dict[str, dict[str, Path]]:
    """Client -> split -> file, of files side by side: `north.jsonl`, or `north-train.csv` and `north-test.csv`.

    Raises:
        UserError: two files for one split of a client.
    """
    endings = {word: split for split, words in SPLIT_NAMES.items() for word in words}
    form = rf"([^._].*?)(?:[-_.]({'|'.join(endings)}))?(?:{'|'.join(map(re.escape, SUFFIXES))})"
    found: dict[str, dict[str, Path]] = {}
    for file in sorted(path.iterdir(), key=lambda file: natural_order(file.name)):
        match = re.fullmatch(form, file.name)
        if match is None or match[1] in endings or not file.is_file():
            continue
        splits = found.setdefault(match[1], {})
        other = splits.setdefault(endings.get(match[2], "train"), file)
        if other != file:
            raise UserError(f"{path} holds {other.name} and {file.name}, both for one split of a client; keep one")
    return found


def read_client(files: dict[str, Path], client: str, config: TaskConfig, store: Store | None = None) -> ClientData:
    """One client's files by split, as far as they exist.

    Args:
        store: where the examples are put (default: in one of their own).
    """
    store = store or Store()
    splits = dict.fromkeys(SPLIT_NAMES, Stored(store))
    for split, file in files.items():
        rows = read_rows(file)
        if not rows:
            raise UserError(f"client {client!r}: {file} holds no example; add some, or remove the client")
        columns = find_columns(config.columns, rows, str(file))
        splits[split] = Stored(
            store, [store.add(to_example(row, columns, group_of(row, config, client))) for row in rows]
        )
    return ClientData(client, **splits)


def split_files(folder: Path) -> dict[str, Path]:
    """Split -> its file in this folder; two files for one split are an error."""
    found: dict[str, Path] = {}
    for split, names in SPLIT_NAMES.items():
        files = [folder / (name + suffix) for name in names for suffix in SUFFIXES]
        files = [file for file in files if file.is_file()]
        if len(files) > 1:
            raise UserError(f"{folder} holds {files[0].name} and {files[1].name}, both for {split}; keep one")
        if files:
            found[split] = files[0]
    return found


def by_column(rows: Mapping[str, Iterable[Row]], config: TaskConfig, where: str) -> dict[str, ClientData]:
    """Rows by split -> clients by their client column; without one, a client "all" for a partition.

    Args:
        rows: which one can go through several times.
    """
    store, clients = Store(), defaultdict[str, dict[str, list[int]]](lambda: {split: [] for split in SPLIT_NAMES})
    for split, names in SPLIT_NAMES.items():
        part = [rows[name] for name in names if name in rows]
        if not any(True for each in part for _ in each):
            if split == "train":
                raise UserError(f"{where} has no training rows; it needs a train split with at least one row")
            continue
        columns = find_columns(config.columns, chain.from_iterable(part), f"{where}, {split} split")
        if "client" not in columns and config.partition.kind == "natural":
            raise UserError(
                f"{where}: no column names the client of a row; set task.columns.client=COLUMN, "
                "or task.partition.kind=iid and task.partition.clients=N"
            )
        for row in chain.from_iterable(part):
            client = text_of(row, columns["client"]).strip() if "client" in columns else "all"
            clients[client][split].append(store.add(to_example(row, columns, group_of(row, config, client))))
    return {
        client: ClientData(client, *(Stored(store, clients[client][split]) for split in SPLIT_NAMES))
        for client in sorted(clients, key=natural_order)
    }


def group_of(row: Row, config: TaskConfig, client: str) -> str:
    """What a partition by label divides by: the column `task.partition.label`, else the client."""
    label = config.partition.label
    if label is None:
        return client
    check_column("task.partition.label", label, row.values, row.where)
    return text_of(row, label)


def natural_order(name: str) -> list[str | int]:
    """A sort key by which client2 comes before client10."""
    parts = re.split(r"(\d{1,18})", name)  # of thousands of digits Python makes no number
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]
