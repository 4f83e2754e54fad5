"""Checkpoints: a round's complete state on disk, written so that a crash at any moment leaves the previous one whole.

`checkpoints/round-0007/` holds `state.safetensors` (a packed message) and `manifest.json` (its checksum and the rows it
refers to). What is one row per client lies once in `checkpoints/rows/<sha256>.safetensors`, shared by all checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_fed.errors import RunError
from llm_fed.wire import WireError, pack, unpack

_NAME = re.compile(r"round-(\d+)")


class CheckpointWarning(UserWarning):
    """A checkpoint was damaged and an older one is used."""


def write_file(path: Path, data: bytes) -> None:
    """Write `data` so that `path` holds either all of it or what it held before, whatever happens meanwhile."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it was read."""

    round: int
    state: Any  # the message given to `save`
    rows: dict[str, Any]  # the rows given to `save`


class Checkpoints:
    """The checkpoints of one run folder; there is one writer (the run holds a lock)."""

    def __init__(self, folder: Path):
        self.folder, self._rows = folder, folder / "rows"
        self._rows.mkdir(parents=True, exist_ok=True)
        for leftover in [*folder.glob(".*.partial"), *self._rows.glob(".*.partial")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()

    def rounds(self) -> list[int]:
        """The rounds that have a checkpoint, oldest first."""
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(self, round: int, state: Any, rows: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `round`: `state` and `rows` are messages (`wire.pack`), rows of equal content
        stored once.

        Raises:
            RunError: the disk is full or cannot be written; nothing half-written stays, earlier checkpoints are
                untouched.
        """
        final = self._path(round)
        partial = self.folder / f".{final.name}.partial"
        try:
            manifest = {"round": round, "rows": {key: self._store(row) for key, row in rows.items()}}
            data = pack(state)
            manifest["sha256"] = hashlib.sha256(data).hexdigest()
            partial.mkdir()
            write_file(partial / "state.safetensors", data)
            write_file(partial / "manifest.json", json.dumps(manifest, indent=1).encode())
            if final.exists():
                shutil.rmtree(final)
            os.replace(partial, final)
            _sync_folder(self.folder)
        except OSError as error:
            raise RunError(
                f"cannot write the checkpoint of round {round} to {final}: {error.strerror or error}. "
                "Earlier checkpoints are whole: make room, then give the same command to continue."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return final

    def load(self, round: int) -> Saved:
        """Read one checkpoint.

        Raises:
            WireError: it is missing a part or damaged.
        """
        folder = self._path(round)
        try:
            manifest = json.loads((folder / "manifest.json").read_bytes())
            data = (folder / "state.safetensors").read_bytes()
            if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
                raise WireError("state.safetensors does not have the checksum of its manifest")
            return Saved(round, unpack(data), {key: self._fetch(name) for key, name in manifest["rows"].items()})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise WireError(f"{folder} is damaged: {error}") from error

    def latest(self) -> Saved | None:
        """The newest checkpoint that is whole; a damaged one is passed over with a warning. None where there is none.

        Raises:
            RunError: there are checkpoints, and all are damaged.
        """
        rounds = self.rounds()
        for round in reversed(rounds):
            try:
                return self.load(round)
            except WireError as error:
                warnings.warn(f"{error}; falling back to an earlier checkpoint", CheckpointWarning, stacklevel=2)
        if rounds:
            raise RunError(f"every checkpoint in {self.folder} is damaged; start again with --fresh")
        return None

    def prune(self, keep: Callable[[int], bool]) -> None:
        """Delete the checkpoints of rounds for which `keep(round)` is false, then rows that none refers to."""
        for round in self.rounds():
            if not keep(round):
                # Renamed first, so that a crash in the middle of the deletion leaves no half checkpoint.
                doomed = self.folder / f".{self._path(round).name}.partial"
                os.replace(self._path(round), doomed)
                shutil.rmtree(doomed)
        used: set[str] = set()
        for round in self.rounds():
            used |= _rows_of(self._path(round))
        for path in self._rows.iterdir():
            if path.name not in used:
                path.unlink()

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:04d}"

    def _store(self, row: Any) -> str:
        data = pack(row)
        name = f"{hashlib.sha256(data).hexdigest()}.safetensors"
        if not (self._rows / name).exists():
            write_file(self._rows / name, data)
        return name

    def _fetch(self, name: str) -> Any:
        data = (self._rows / name).read_bytes()
        if f"{hashlib.sha256(data).hexdigest()}.safetensors" != name:
            raise WireError(f"row {name} does not have the content that its name says")
        return unpack(data)


def _rows_of(folder: Path) -> set[str]:
    try:
        return set(json.loads((folder / "manifest.json").read_bytes())["rows"].values())
    except (OSError, ValueError, KeyError):
        return set()
