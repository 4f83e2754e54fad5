"""Rows: what is kept of single clients, packed; in RAM until a checkpoint, then in files named by their content.

A run has one store. The memories of its sites are rows, and so are the uploads on their way. Checkpoints refer to rows
by name (`checkpoint.py`), so a row is packed, hashed and written once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from llm_fed.basics.errors import RunError
from llm_fed.basics.files import make_folder, read_file, sync_files, write_file
from llm_fed.state.outline import Skeleton
from llm_fed.state.wire import Message, WireError, pack, unpack


class RowStore:
    """The rows of one run. `folder` holds them as `<sha256>.safetensors`; a content lies there once. `beside`: whether
    another process may write there. Nothing is changed then, and what was read stays in RAM, as the other process may
    delete its file."""

    def __init__(self, folder: Path, *, beside: bool = False):
        if not beside:
            make_folder(folder, 0o700)
            for leftover in folder.glob(".*.partial"):
                leftover.unlink()
        self.folder, self._beside = folder, beside
        self._unsynced: set[Path] = set()  # files that a power failure may still damage
        self._named: Counter[str] = Counter()  # by name, how many rows that somebody holds have this file

    def row(self, data: bytes) -> StoredRow:
        """A new row of these packed bytes."""
        return StoredRow(self, data)

    def saved(self, name: str) -> StoredRow:
        """The row whose file has this name, which is read again when it is needed. OSError: the file is missing or
        cannot be read. WireError: it is damaged."""
        data = self._read(name)  # also where it is not kept, as a damaged one is told now
        return StoredRow(self, data if self._beside else None, name)

    def sync(self) -> None:
        """Bring all files that have been written safely to the disk, with their names."""
        sync_files(self._unsynced)
        self._unsynced.clear()

    def prune(self, used: Collection[str]) -> None:
        """Delete the files that are neither `used` nor of a row that somebody still holds."""
        for path in self.folder.iterdir():
            if path.name not in used and not self._named[path.name]:
                path.unlink()

    def _write(self, name: str, data: bytes) -> None:
        """Write a row's file, also over one that is there but was not read: a power failure may have damaged it."""
        if not self._named[name]:
            write_file(self.folder / name, data, sync=False, private=True)
            self._unsynced.add(self.folder / name)

    def _read(self, name: str) -> bytes:
        data = read_file(self.folder / name)
        if _name_of(data) != name:
            raise WireError(f"row {name} does not have the content that its name says")
        return data


class StoredRow:
    """One packed message. Its bytes never change; where they lie does. `data`: where it is in RAM. `name`: where it has
    a file."""

    __slots__ = ("_store", "_data", "_name", "_digest")

    def __init__(self, store: RowStore, data: bytes | None, name: str | None = None):
        self._store, self._data, self._name = store, data, name
        self._digest: str | None = None  # once somebody has asked
        if name:
            store._named[name] += 1

    def __del__(self) -> None:
        if self._name:
            self._store._named[self._name] -= 1

    def message(self, expected: Skeleton | None = None) -> Message:
        """The message, in fresh memory. WireError: another party made it, and it is none, or not as expected. RunError:
        its file was damaged meanwhile. `expected`: see `wire.unpack`."""
        if self._data is not None:
            return unpack(self._data, expected)
        assert self._name is not None  # only what has a file leaves the RAM
        try:
            data = self._store._read(self._name)
        except (OSError, WireError) as error:
            raise RunError(
                f"{self._store.folder / self._name} cannot be read: {error}. "
                "Give the same command again: it continues from a checkpoint that is whole."
            ) from error
        return unpack(data, expected)

    @property
    def digest(self) -> str:
        """SHA-256 of the packed bytes, in hexadecimal digits; also the stem of the row's file."""
        if self._digest is None:
            self._digest = (self._name or _name_of(self._data or b"")).partition(".")[0]
        return self._digest

    def file(self) -> str:
        """Write the row's file, where it is not there yet, and leave the RAM; its name. It is safe once the store is
        synced."""
        if self._name is None:
            assert self._data is not None
            name = f"{self.digest}.safetensors"
            self._store._write(name, self._data)
            self._store._named[name] += 1
            self._name, self._data = name, None
        return self._name


@dataclass(eq=False)
class Memory(MutableMapping[str, Message]):
    """What one site remembers, by key; each value is a row of its own.

    What is read is a copy in fresh memory: to change a value, assign it again.
    """

    store: RowStore
    rows: dict[str, StoredRow] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Message:
        return self.rows[key].message()

    def __setitem__(self, key: str, value: Message) -> None:
        self.rows[key] = self.store.row(pack(value))

    def __delitem__(self, key: str) -> None:
        del self.rows[key]

    def __contains__(self, key: object) -> bool:
        return key in self.rows  # the inherited one would read the row

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_disk(self) -> None:
        """Let its rows lie on the disk alone; RunError if it is full."""
        try:
            for row in self.rows.values():
                row.file()
        except OSError as error:
            raise RunError(f"cannot write a row to {self.store.folder}: {error.strerror or error}") from error

    def __copy__(self) -> Memory:
        return Memory(self.store, dict(self.rows))


def _name_of(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()}.safetensors"
