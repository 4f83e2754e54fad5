"""Examples of text as one Arrow table in a temporary file, of which a client holds the places of its rows: an example
is a Python object only while somebody looks at it. Fewer than BATCH stay in memory.
"""

from __future__ import annotations

import json
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, TYPE_CHECKING, overload

import numpy as np

from llm_fed.basics.errors import RunError
from llm_fed.tasks.common import Example, Turn

if TYPE_CHECKING:  # runs without files of examples need none of it
    import pyarrow

BATCH = 4096  # examples that are written together
COLUMNS = ("example", "where")  # as JSON, and the file and the row in which it stands


class Store:
    """Examples: first all are added, then they are read. RunError where the folder for temporary files is full or
    cannot be written."""

    def __init__(self) -> None:
        self._waiting: list[tuple[bytes, bytes]] = []
        self._count = 0
        self._file: IO[bytes] | None = None
        self._files: dict[str, int] = {}
        self._groups: dict[str, int] = {}
        # Of each example the places of its file and group, its digest, and a checksum of how it is written.
        self.codes, self.groups, self.digests, self.checksums = array("I"), array("I"), array("Q"), array("I")

    @property
    def files(self) -> list[str]:
        return [*self._files]

    def add(self, example: Example, file: str = "", where: str = "") -> int:
        """The place of the example from now on; `file` is the one in which it stands, `where` says its row, too."""
        e = example
        parts = (e.prompt, e.answers, e.options, e.fields, e.rejected, e.desirable, e.extra, e.pair)
        written = _bytes(json.dumps(parts, ensure_ascii=False))
        self.codes.append(self._files.setdefault(file, len(self._files)))
        self.groups.append(self._groups.setdefault(e.group, len(self._groups)))
        self.digests.append(e.digest)
        self.checksums.append(zlib.crc32(written))
        self._waiting.append((written, _bytes(where)))
        self._count += 1
        if self._count % BATCH == 0:
            self._write()
        return self._count - 1

    def __getitem__(self, place: int) -> Example:
        prompt, answers, options, fields, rejected, desirable, extra, pair = json.loads(_text(self.table[0], place))
        turns = tuple(Turn(*turn) for turn in rejected)
        asked = prompt if isinstance(prompt, str) else tuple(Turn(*turn) for turn in prompt)
        group, own = self._names[self.groups[place]], tuple((name, value) for name, value in extra)
        return Example(asked, tuple(answers), tuple(options), group, fields, turns, desirable, own, pair)

    def where(self, place: int) -> str:
        return _text(self.table[1], place)

    @cached_property
    def _names(self) -> list[str]:
        return [*self._groups]

    @cached_property
    def table(self) -> pyarrow.Table:
        """The columns of COLUMNS; what is in the file is mapped from it, and it needs no name any more."""
        import pyarrow.ipc

        if self._file is None:
            return pyarrow.Table.from_batches([self._batch()])
        self._write()
        try:
            self._writer.close()
            self._file.flush()
            table = pyarrow.ipc.open_file(pyarrow.memory_map(self._file.name)).read_all()
        except OSError as error:
            raise _unwritable(error) from error
        self._file.close()
        return table

    def _write(self) -> None:
        import pyarrow.ipc

        batch = self._batch()
        try:
            if self._file is None:
                self._file = tempfile.NamedTemporaryFile(prefix="llm_fed-", suffix=".arrow")  # noqa: SIM115
                self._writer = pyarrow.ipc.new_file(self._file, batch.schema)
            self._writer.write_batch(batch)
        except OSError as error:
            raise _unwritable(error) from error

    def _batch(self) -> pyarrow.RecordBatch:
        """Those that wait, which then wait no longer. Bytes, as JSON may hold halves of characters, which are no
        UTF-8."""
        import pyarrow

        columns = zip(*self._waiting, strict=True) if self._waiting else [()] * len(COLUMNS)
        batch = pyarrow.record_batch([pyarrow.array(each, pyarrow.binary()) for each in columns], [*COLUMNS])
        self._waiting = []
        return batch


class Stored(Sequence[Example]):
    """Examples of a store, by their places."""

    def __init__(self, store: Store, places: Iterable[int] = ()):
        self._store, self._places = store, np.fromiter(places, np.int64)

    def take(self, chosen: Sequence[int]) -> Stored:
        return Stored(self._store, self._places[np.asarray(chosen, np.int64)])

    def where(self, index: int) -> str:
        """File and row of an example, for messages."""
        return self._store.where(int(self._places[index]))

    @property
    def files(self) -> list[str]:
        return self._store.files

    @property
    def codes(self) -> np.ndarray:
        """(N,) the place of each example's file in `files`."""
        return np.asarray(self._store.codes)[self._places]

    @property
    def digests(self) -> np.ndarray:
        """(N,) uint64, see `content`."""
        return np.asarray(self._store.digests)[self._places]

    @property
    def checksums(self) -> np.ndarray:
        """(N,) uint32, of how each example is written."""
        return np.asarray(self._store.checksums)[self._places]

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...

    @overload
    def __getitem__(self, index: slice) -> Stored: ...

    def __getitem__(self, index: int | slice) -> Example | Stored:
        if isinstance(index, slice):
            return Stored(self._store, self._places[index])
        return self._store[int(self._places[index])]

    def __iter__(self) -> Iterator[Example]:
        return (self._store[place] for place in self._places.tolist())

    def __add__(self, other: Sequence[Example]) -> Sequence[Example]:
        if isinstance(other, Stored) and other._store is self._store:
            return Stored(self._store, np.concatenate([self._places, other._places]))
        return (*self, *other)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Example.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(column: pyarrow.ChunkedArray, place: int) -> str:
    return str(column[place].as_py().decode("utf-8", "surrogatepass"))


def _unwritable(error: OSError) -> RunError:
    folder = Path(tempfile.gettempdir())
    return RunError(
        f"cannot write the examples to {folder}: {error.strerror or error}; make room, or set TMPDIR to another folder"
    )
