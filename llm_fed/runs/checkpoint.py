"""Checkpoints: a round's complete state on disk, written so that a crash at any moment leaves the previous one whole.

`checkpoints/round-0007/` holds `state.safetensors` (a packed message) and `manifest.json` (its checksum, the rows it
refers to, and a checksum of the manifest itself). What is one row per client lies once in
`checkpoints/rows/<sha256>.safetensors`, shared by all checkpoints and by the run itself (`rows.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fed.basics import checksum
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import check_unlinked, put_folder, read_file, remove, sync_folder, write_file
from llm_fed.runs.records import read_object
from llm_fed.runs.rows import Memory, RowStore, StoredRow
from llm_fed.state.wire import Message, WireError, pack, unpack

_NAME = re.compile(r"round-(\d+)")
Rows = Mapping[str, StoredRow | Mapping[str, StoredRow]]  # a row, or the rows of one owner by key
BEST = "best"


class DamagedCheckpoint(WireError, RunError):
    """A checkpoint that cannot be read."""


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and an older one is used."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it was read."""

    round: int
    state: Any  # the message given to `save`
    rows: Rows  # the rows given to `save`
    store: RowStore

    def memory(self, owner: str) -> Memory:
        """What the owner of these rows remembered; nothing where there are none."""
        held = self.rows.get(owner, {})
        if isinstance(held, StoredRow):
            raise DamagedCheckpoint(f"the checkpoint of round {self.round} has one row where {owner} has several")
        return Memory(self.store, dict(held))


def rounds_in(folder: Path) -> list[int]:
    """The rounds that have a checkpoint in the folder, oldest first; none where there is no such folder."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("round-*"))
    return sorted(int(match[1]) for match in matches if match)


class Checkpoints:
    """The checkpoints of one run folder; there is one writer (the run holds a lock). `beside`: whether they are only
    read, and another process may write to them (`RowStore`). `store`: the run's rows."""

    def __init__(self, folder: Path, *, beside: bool = False):
        check_unlinked(folder)
        self.folder, self.store = folder, RowStore(folder / "rows", beside=beside)
        for pattern in (".*.partial", ".*.replaced") if not beside else ():
            for leftover in folder.glob(pattern):
                remove(leftover)

    def save(self, round: int, state: Message, rows: Rows) -> Path:
        """Write the checkpoint of `round`: the message `state` (`wire.pack`), and those of the `rows` that have no file
        yet. RunError: the disk is full or cannot be written; nothing half-written stays, earlier checkpoints are
        untouched."""
        final = self._path(round)
        partial = self.folder / f".{final.name}.partial"
        try:
            manifest = {"round": round, "rows": {key: _files(row) for key, row in rows.items()}}
            self.store.sync()
            data = pack(state)
            manifest["sha256"] = hashlib.sha256(data).hexdigest()
            partial.mkdir(mode=0o700)
            write_file(partial / "state.safetensors", data, private=True)
            write_file(partial / "manifest.json", json.dumps(checksum.added(manifest)).encode(), private=True)
            put_folder(partial, final)
            sync_folder(self.folder)
        except OSError as error:
            raise RunError(
                f"cannot write the checkpoint of round {round} to {final}: {error.strerror or error}. "
                "Earlier checkpoints are whole: make room, then give the same command to continue."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final

    def load(self, round: int) -> Saved:
        """Read one checkpoint. DamagedCheckpoint: it is missing a part or damaged."""
        folder = self._path(round)
        try:
            manifest = _manifest(folder)
            data = read_file(folder / "state.safetensors")
            if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
                raise WireError("state.safetensors does not have the checksum of its manifest")
            rows = {key: self._rows(names) for key, names in manifest["rows"].items()}
            return Saved(round, unpack(data), rows, self.store)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpoint(f"{folder} is damaged: {error}") from error

    def latest(self) -> Saved | None:
        """The newest checkpoint that is whole; a damaged one is passed over with a warning. None where there is none.
        RunError: there are checkpoints, and all are damaged."""
        rounds = rounds_in(self.folder)
        for round in reversed(rounds):
            try:
                return self.load(round)
            except WireError as error:
                warnings.warn(f"{error}; falling back to an earlier checkpoint", CheckpointWarning, stacklevel=2)
        if rounds:
            raise RunError(f"every checkpoint in {self.folder} is damaged; start again with --fresh")
        return None

    def prune(self, keep: Callable[[int], bool]) -> None:
        """Delete the checkpoints of rounds for which `keep(round)` is false, then rows that none refers to. RunError:
        the folder cannot be changed."""
        try:
            for round in rounds_in(self.folder):
                if not keep(round):
                    # Renamed first, so that a crash in the middle of the deletion leaves no half checkpoint.
                    doomed = self.folder / f".{self._path(round).name}.partial"
                    os.replace(self._path(round), doomed)
                    remove(doomed)
            self.store.prune({name for round in rounds_in(self.folder) for name in _names_in(self._path(round))})
        except OSError as error:
            raise RunError(
                f"cannot delete old checkpoints in {self.folder}: {error.strerror or error}. "
                "The newest is whole; once the folder can be changed, give the same command to continue."
            ) from error

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:04d}"

    def _rows(self, names: str | dict[str, str]) -> StoredRow | dict[str, StoredRow]:
        if isinstance(names, str):
            return self.store.saved(names)
        return {key: self.store.saved(name) for key, name in names.items()}


def _files(row: StoredRow | Mapping[str, StoredRow]) -> str | dict[str, str]:
    return row.file() if isinstance(row, StoredRow) else {key: item.file() for key, item in row.items()}


def _names_in(folder: Path) -> Iterator[str]:
    """The rows that a checkpoint refers to; none where it is damaged."""
    try:
        rows = _manifest(folder)["rows"]
    except (OSError, ValueError, RecursionError):
        return
    for names in rows.values():
        yield from [names] if isinstance(names, str) else names.values()


def _manifest(folder: Path) -> dict[str, Any]:
    """What a checkpoint's manifest says; ValueError where it is damaged."""
    try:
        return read_object(folder / "manifest.json")
    except ValueError as error:
        raise ValueError(f"manifest.json: {error}") from error


@dataclass(frozen=True)
class Place:
    """A folder, and of a run which round of it."""

    folder: Path
    round: int | str | None = None  # its number or `BEST`; None: what the run has exported

    @classmethod
    def parse(cls, text: str | Path) -> Place:
        """From `DIR`, `DIR@ROUND` or `DIR@best`; a folder whose own name has an @ in it is taken as it is. UserError:
        DIR is a run, and behind the @ stands something else."""
        folder, at, word = str(text).rpartition("@")
        if not at or Path(text).exists():
            return cls(Path(text))
        if word == BEST:
            return cls(Path(folder), "best")
        if word.isascii() and word.isdigit():
            return cls(Path(folder), int(word))
        if (Path(folder) / "config.yaml").is_file():
            raise UserError(f"{text}: behind the @ stands the number of a round, or {BEST}")
        return cls(Path(text))

    def __str__(self) -> str:
        return f"{self.folder}" + ("" if self.round is None else f"@{self.round}")


def check_kept(folder: Path, round: int) -> None:
    """Refuse a round of which a run has kept no checkpoint. UserError: which rounds it has, and what keeps others."""
    if round not in (kept := rounds_in(folder / "checkpoints")):
        known = ", ".join(map(str, kept)) or "none"
        raise UserError(
            f"{folder} has no checkpoint of round {round}, only of {known}; checkpoint.keep_rounds=[{round}] keeps it "
            "in a run that has not yet come so far; llm-fed run --fresh begins one"
        )
