"""Rows: what is kept of single clients, packed; in RAM up to a limit, beyond it in files named by their content.

A run has one store. The memories of its sites are rows, and so are the uploads on their way. Checkpoints refer to rows
by name (`checkpoint.py`), so a row is packed, hashed and written once, by whoever comes first: the checkpoint that
refers to it, or the limit.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from pathlib import Path

from llm_fed.basics.errors import RunError
from llm_fed.basics.files import make_folder, read_file, sync_files, write_file
from llm_fed.state.outline import Skeleton
from llm_fed.state.wire import Message, WireError, pack, unpack


class RowStore:
    """The rows of one run. `folder` holds them as `<sha256>.safetensors`; a content lies there once.

    Args:
        limit: most bytes of packed rows in RAM; beyond it the least recently used lie in `folder` alone.
        beside: whether another process may write there. Nothing is changed then: rows of one's own stay in RAM, and so
            do those that were read, up to the limit, as the other process may delete their files.

    Attributes:
        in_ram: bytes of packed rows in RAM.
    """

    def __init__(self, folder: Path, limit: float = math.inf, *, beside: bool = False):
        if not beside:
            make_folder(folder, 0o700)
            for leftover in folder.glob(".*.partial"):
                leftover.unlink()
        self.folder, self.limit, self.in_ram, self._beside = folder, limit, 0, beside
        self._unsynced: set[Path] = set()  # files that a power failure may still damage
        # Both forget a row when nobody holds it any more; the store itself keeps none alive.
        self._recent: OrderedDict[int, weakref.ref[StoredRow]] = OrderedDict()  # by id, those in RAM, oldest use first
        self._named: Counter[str] = Counter()  # by name, how many rows have this file

    def row(self, data: bytes) -> StoredRow:
        """A new row of these packed bytes; RunError if others have to make room and the disk is full."""
        row = StoredRow(self)
        self._keep(row, data)
        return row

    def saved(self, name: str) -> StoredRow:
        """The row whose file has this name, which is read when it is needed.

        Raises:
            OSError: the file is missing or cannot be read.
            WireError: it is damaged.
        """
        self._read(name)
        row = StoredRow(self)
        self._name(row, name)
        return row

    def sync(self) -> None:
        """Bring all files that have been written safely to the disk, with their names."""
        sync_files(self._unsynced)
        self._unsynced.clear()

    def prune(self, used: Collection[str]) -> None:
        """Delete the files that are neither `used` nor of a row that somebody still holds."""
        for path in self.folder.iterdir():
            if path.name not in used and path.name not in self._named:
                path.unlink()

    def _write(self, name: str, data: bytes) -> None:
        """Write a row's file, also over one that is there but was not read: a power failure may have damaged it."""
        if name not in self._named:
            write_file(self.folder / name, data, sync=False, private=True)
            self._unsynced.add(self.folder / name)

    def _read(self, name: str) -> bytes:
        data = read_file(self.folder / name)
        if _name_of(data) != name:
            raise WireError(f"row {name} does not have the content that its name says")
        return data

    def _name(self, row: StoredRow, name: str) -> None:
        row._name = name
        self._named[name] += 1

    def _keep(self, row: StoredRow, data: bytes) -> None:
        """Hold the row's bytes in RAM, as the most recently used, and make room."""
        row._data = data
        self._recent[id(row)] = weakref.ref(row)
        self.in_ram += len(data)
        while self.in_ram > self.limit:
            oldest = next(iter(self._recent.values()))()
            assert oldest is not None  # see StoredRow.__del__
            try:
                oldest.file()
            except OSError as error:
                raise RunError(
                    f"cannot write a row to {self.folder}: {error.strerror or error}. "
                    "Make room or raise checkpoint.memory_limit, then give the same command to continue."
                ) from error
            self._drop(oldest)

    def _drop(self, row: StoredRow) -> None:
        if self._recent.pop(id(row), None) is not None and row._data is not None:
            self.in_ram -= len(row._data)
            row._data = None

    def _forget(self, row: StoredRow) -> None:
        self._drop(row)
        if row._name is not None:
            self._named[row._name] -= 1
            if not self._named[row._name]:
                del self._named[row._name]


class StoredRow:
    """One packed message. Its bytes never change; where they lie does."""

    __slots__ = ("_store", "_data", "_name", "_digest", "__weakref__")

    def __init__(self, store: RowStore):
        self._store = store
        self._data: bytes | None = None  # where it is in RAM
        self._name: str | None = None  # where it has a file
        self._digest: str | None = None  # once somebody has asked

    def __del__(self) -> None:
        self._store._forget(self)

    def message(self, expected: Skeleton | None = None) -> Message:
        """The message, in fresh memory.

        Args:
            expected: see `wire.unpack`.

        Raises:
            WireError: another party made it, and it is none, or not as expected.
            RunError: its file was damaged meanwhile.
        """
        data = self._data
        if data is not None:
            self._store._recent.move_to_end(id(self))
            return unpack(data, expected)
        assert self._name is not None  # only what has a file leaves the RAM
        try:
            data = self._store._read(self._name)
        except (OSError, WireError) as error:
            raise RunError(
                f"{self._store.folder / self._name} cannot be read: {error}. "
                "Give the same command again: it continues from a checkpoint that is whole."
            ) from error
        self._store._keep(self, data)
        return unpack(data, expected)

    @property
    def digest(self) -> str:
        """SHA-256 of the packed bytes, in hexadecimal digits; also the stem of the row's file."""
        if self._digest is None:
            self._digest = (self._name or _name_of(self._data or b"")).partition(".")[0]
        return self._digest

    def file(self) -> str:
        """Write the row's file, where it is not there yet; its name. It is safe once the store is synced."""
        if self._name is None:
            assert self._data is not None
            name = f"{self.digest}.safetensors"
            self._store._write(name, self._data)
            self._store._name(self, name)
            return name
        return self._name


class Memory(MutableMapping[str, Message]):
    """What one site remembers, by key; each value is a row of its own.

    What is read is a copy in fresh memory: to change a value, assign it again.
    """

    def __init__(self, store: RowStore, rows: Mapping[str, StoredRow] | None = None):
        self._store, self.rows = store, dict(rows or {})

    def __getitem__(self, key: str) -> Message:
        return self.rows[key].message()

    def __setitem__(self, key: str, value: Message) -> None:
        self.rows[key] = self._store.row(pack(value))

    def __delitem__(self, key: str) -> None:
        del self.rows[key]

    def __contains__(self, key: object) -> bool:
        return key in self.rows  # the inherited one would read the row

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __copy__(self) -> Memory:
        return Memory(self._store, self.rows)


def _name_of(data: bytes) -> str:
    return f"{hashlib.sha256(data).hexdigest()}.safetensors"
