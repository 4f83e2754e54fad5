"""Examples of text as Arrow columns: an example is a Python object only while somebody looks at it, so that hundreds of
thousands of clients cost their places. More than a few lie in a file on the disk, mapped into memory.
"""

from __future__ import annotations

import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, overload

import numpy as np

from llm_fed.basics.errors import RunError
from llm_fed.tasks.common import Example, Turn

if TYPE_CHECKING:  # runs without files of examples need none of it
    import pyarrow

BATCH = 4096  # examples that are written together
# A prompt is one text, two of a pair, or four fields of each turn.
_COLUMNS = ("prompt", "answers", "options", "group", "fields", "rejected", "desirable", "extra")
_LISTS = ("prompt", "answers", "options", "rejected", "extra")


class Store:
    """Examples: first all are added, then they are read. From BATCH on they lie in a file, which is deleted with the
    process. RunError where the folder for temporary files is full or cannot be written."""

    def __init__(self) -> None:
        self._waiting: list[list[Any]] = [[] for _ in _COLUMNS]
        self._count = 0
        self._file: IO[bytes] | None = None
        self.files: list[str] = []
        self._places: dict[str, int] = {}  # of each file
        self.codes, self.digests, self.checksums = array("I"), array("Q"), array("I")  # of each example
        self.leads: dict[str, int] = {}  # of each text before the number of a row
        self.spots = array("I")  # of each example the place of that text, and the number

    def add(self, example: Example, file: str = "", where: str = "") -> int:
        """The place of the example from now on; `file` is the one in which it stands, `where` says its row, too."""
        if isinstance(example.prompt, str):
            prompt = [example.prompt, *([example.pair] if example.pair else [])]
        else:
            prompt = [*chain(*map(_flat, example.prompt))]
        texts = [_bytes(prompt), _bytes(example.answers), _bytes(example.options)]
        group, fields = _bytes([example.group, example.fields])
        rejected = _bytes(chain(*map(_flat, example.rejected)))
        extra = _bytes(chain(*((name, repr(value)) for name, value in example.extra)))
        row = (*texts, group, fields, rejected, example.desirable, extra)
        for column, value in zip(self._waiting, row, strict=True):
            column.append(value)
        if file not in self._places:
            self._places[file] = len(self.files)
            self.files.append(file)
        self.codes.append(self._places[file])
        self.digests.append(example.digest)
        own = [*example.compared, *map(str, example.extra)]
        more = [b"", *_bytes(own)] if own else []
        lead = where.rstrip("0123456789")
        self.spots.extend((self.leads.setdefault(lead, len(self.leads)), int(where[len(lead) :] or 0)))
        self.checksums.append(zlib.crc32(b"\0".join([*texts[0], b"", *texts[1], b"", *texts[2], fields, *more])))
        self._count += 1
        if self._count % BATCH == 0:
            self._write()
        return self._count - 1

    def __getitem__(self, place: int) -> Example:
        columns = self._columns[place // BATCH]
        values = {name: column[place % BATCH].as_py() for name, column in zip(_COLUMNS, columns, strict=True)}
        desirable = values.pop("desirable")
        prompt, answers, options, (group,), (fields,), rejected, extra = (
            _texts(value if isinstance(value, list) else [value]) for value in values.values()
        )
        paired = len(prompt) == 2
        return Example(
            prompt[0] if len(prompt) < 3 else _turns(prompt), tuple(answers), tuple(options), group, fields,
            _turns(rejected), desirable, tuple(zip(extra[::2], map(float, extra[1::2]), strict=True)),
            prompt[1] if paired else "",
        )  # fmt: skip

    @cached_property
    def _columns(self) -> list[list[pyarrow.Array]]:
        """Of each batch; those in the file are mapped from it, and it needs no name any more."""
        if self._file is None:
            return [self._arrays()]
        import pyarrow.ipc

        self._write()
        try:
            self._writer.close()
            self._file.flush()
            reader = pyarrow.ipc.open_file(pyarrow.memory_map(self._file.name))
        except OSError as error:
            raise _unwritable(error) from error
        self._file.close()
        return [reader.get_batch(number).columns for number in range(reader.num_record_batches)]

    def _write(self) -> None:
        import pyarrow.ipc

        arrays = self._arrays()
        try:
            if self._file is None:
                self._file = tempfile.NamedTemporaryFile(prefix="llm_fed-", suffix=".arrow")  # noqa: SIM115
                self._writer = pyarrow.ipc.new_file(self._file, _schema())
            if len(arrays[0]):
                self._writer.write_batch(pyarrow.record_batch(arrays, schema=_schema()))
        except OSError as error:
            raise _unwritable(error) from error

    def _arrays(self) -> list[pyarrow.Array]:
        """Those that wait, which then wait no longer."""
        import pyarrow

        waiting, self._waiting = self._waiting, [[] for _ in _COLUMNS]
        return [pyarrow.array(column, field.type) for column, field in zip(waiting, _schema(), strict=True)]


class Stored(Sequence[Example]):
    """Examples of a store, by their places."""

    def __init__(self, store: Store, places: Iterable[int] = ()):
        self._store, self._places = store, np.fromiter(places, np.int64)

    def take(self, chosen: Sequence[int]) -> Stored:
        return Stored(self._store, self._places[np.asarray(chosen, np.int64)])

    def where(self, index: int) -> str:
        """File and row of an example, for messages."""
        place = 2 * int(self._places[index])
        lead, number = self._store.spots[place : place + 2]
        return f"{[*self._store.leads][lead]}{number}"

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

    def __repr__(self) -> str:
        return f"Stored({list(self)})"


def _schema() -> pyarrow.Schema:
    """Bytes, as JSON may hold halves of characters, which are no UTF-8."""
    import pyarrow

    text = pyarrow.binary()
    types = {name: pyarrow.list_(text) if name in _LISTS else text for name in _COLUMNS}
    return pyarrow.schema(types | {"desirable": pyarrow.bool_()})


def _flat(turn: Turn) -> tuple[str, str, str, str]:
    return turn.role, turn.content, "trained" if turn.trained else "", turn.fields


def _turns(flat: Sequence[str]) -> tuple[Turn, ...]:
    parts = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    return tuple(Turn(role, content, bool(trained), fields) for role, content, trained, fields in parts)


def _bytes(texts: Iterable[str]) -> list[bytes]:
    return [text.encode("utf-8", "surrogatepass") for text in texts]


def _texts(data: Iterable[bytes]) -> list[str]:
    return [each.decode("utf-8", "surrogatepass") for each in data]


def _unwritable(error: OSError) -> RunError:
    folder = Path(tempfile.gettempdir())
    return RunError(
        f"cannot write the examples to {folder}: {error.strerror or error}; make room, or set TMPDIR to another folder"
    )
