"""What a run remembers of its data: in which split each row has been, so that no row is tested that was trained on, and
what has changed in which file since.

A row is known by its digest (`common.digests`), and one byte says where it was. Rows that are gone stay known, as they
may come back.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np

from llm_fed.tasks import common
from llm_fed.tasks.collected import Stored
from llm_fed.tasks.common import ClientData

TRAINING, VALIDATION, TEST = 1, 2, 4
SERVER = 8  # trained on by the server
HERE = 16  # the row is in the data now
_SPLITS = TRAINING | VALIDATION | TEST | SERVER
_NAMES = 5  # clients that a message names at most


@dataclass(frozen=True)
class Change:
    """What has changed in the data of a run while it went on."""

    round: int  # the last one that was trained on the data of before
    files: Mapping[str, str]  # by file what, in words; which clients are new or gone stands under "clients"

    def words(self, most: int = 20) -> str:
        """In one line, with at most so many files."""
        parts = [f"{file}: {what}" for file, what in self.files.items()]
        more = len(parts) - most
        return "; ".join(parts[:most] + ([f"and {more} more {'file' if more == 1 else 'files'}"] if more > 0 else []))


@dataclass(frozen=True, eq=False)
class Record:
    """The rows of a run's data (N) in their files (F)."""

    files: tuple[str, ...]  # their names, below the data's folder; of data without files the clients' names
    checksums: np.ndarray  # (F,) uint32, of each file's rows as they are written and in their order
    codes: np.ndarray  # (N,) the index of each row's file in `files`
    digests: np.ndarray  # (N,) uint64
    splits: np.ndarray  # (N,) uint8, in which splits rows of this digest have been, and whether this one is HERE
    clients: tuple[str, ...]  # their names
    changes: tuple[Change, ...] = ()  # of the past

    @classmethod
    def of(cls, clients: Sequence[ClientData], whole: str) -> Record:
        """The rows of natural clients, all in the data and in no split yet; `whole` is what holds all of them."""
        indices: dict[str, int] = {}
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for client in clients:
            for items in (client.train, client.validation, client.test):
                if not len(items):
                    continue
                names, codes, checksums = _written(items, client.client if len(clients) > 1 else whole)
                names = [_below(name, whole) for name in names]
                known = np.array([indices.setdefault(name, len(indices)) for name in names])
                parts.append((known[codes], common.digests(items), checksums))
        columns = zip(*parts, strict=True) if parts else ([np.empty(0, kind)] for kind in (int, np.uint64, np.uint32))
        codes, digests, checksums = map(np.concatenate, columns)
        order = np.argsort(codes, kind="stable")
        of_files = np.split(checksums[order], np.cumsum(np.bincount(codes, minlength=len(indices)))[:-1])
        return cls(
            tuple(indices),
            np.array([zlib.crc32(own.tobytes()) for own in of_files] if indices else [], np.uint32),
            codes[order],
            digests[order],
            np.full(len(digests), HERE, np.uint8),
            tuple(client.client for client in clients),
        )

    def divided(self, clients: Iterable[ClientData], server: ClientData | None) -> Record:
        clients = list(clients)
        parts = {
            TRAINING: [client.train for client in clients],
            VALIDATION: [client.validation for client in clients],
            TEST: [client.test for client in clients] + ([server.test] if server else []),
            SERVER: [server.train] if server else [],
        }
        splits = self.splits & HERE
        for bit, items in parts.items():
            own = [common.digests(each) for each in items if len(each)]
            if own:
                splits[np.isin(self.digests, np.concatenate(own))] |= bit
        return dataclasses.replace(self, splits=splits)

    def splits_of(self, digests: np.ndarray) -> np.ndarray:
        """(M,) uint8: in which splits rows with these digests (M,) have been; 0 of rows that are not known."""
        known, splits = self._known
        if not len(known):
            return np.zeros(len(digests), np.uint8)
        indices = np.minimum(np.searchsorted(known, digests), len(known) - 1)
        return np.where(known[indices] == digests, splits[indices], np.uint8(0))

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """The different digests, sorted, and in which splits rows of each have been."""
        order = np.argsort(self.digests, kind="stable")
        known, starts = np.unique(self.digests[order], return_index=True)
        splits = self.splits[order] & _SPLITS
        return known, np.bitwise_or.reduceat(splits, starts) if len(starts) else splits

    def trained(self, *parts: Sequence[Any]) -> int:
        """How many of these examples say what one says that was trained on."""
        return sum(int((self.splits_of(common.digests(items)) & (TRAINING | SERVER) > 0).sum()) for items in parts)

    def checksum_of(self, split: int) -> str:
        """Of the rows that are in a split (VALIDATION or TEST) now, in whatever order."""
        chosen = (self.splits & (split | HERE)) == (split | HERE)
        return f"{zlib.crc32(np.sort(self.digests[chosen]).tobytes()):08x}"

    def since(self, earlier: Record) -> dict[str, str]:
        """By file, in words, what is other than in an earlier record of the data; empty where nothing is."""
        now, before = self._by_file, earlier._by_file
        new = [client for client in self.clients if client not in set(earlier.clients)]
        gone = [client for client in earlier.clients if client not in set(self.clients)]
        changes = {"clients": ", ".join([*_named(new, "new"), *_named(gone, "gone")])} if new or gone else {}
        nothing = np.empty(0, np.uint64), 0
        for file in dict.fromkeys([*now, *before]):
            (own, own_sum), (old, old_sum) = now.get(file, nothing), before.get(file, nothing)
            if (len(own), own_sum) != (len(old), old_sum):
                changes[file] = _difference(own, old, earlier)
        return changes

    @cached_property
    def _by_file(self) -> dict[str, tuple[np.ndarray, int]]:
        """By file the digests of its rows that are in the data, in their order, and their checksum."""
        here = self.splits & HERE > 0
        codes, digests = self.codes[here], self.digests[here]
        ends = np.cumsum(np.bincount(codes, minlength=len(self.files)))[:-1]
        parts = zip(self.files, np.split(digests, ends), self.checksums.tolist(), strict=True) if self.files else ()
        return {file: (own, checksum) for file, own, checksum in parts if len(own)}

    def after(self, earlier: Record, round: int) -> Record:
        """This record with what an earlier one of the run knows, whose data were trained on up to `round`."""
        changed = self.since(earlier)
        left = ~np.isin(earlier.digests, self.digests)
        files = {file: index for index, file in enumerate(self.files)}
        indices = np.array([files.setdefault(file, len(files)) for file in earlier.files], np.int64)
        codes = np.concatenate([self.codes, indices[earlier.codes[left]]])
        order = np.argsort(codes, kind="stable")
        past = np.concatenate([self.splits | earlier.splits_of(self.digests), earlier.splits[left] & _SPLITS])
        return Record(
            tuple(files),
            np.concatenate([self.checksums, np.zeros(len(files) - len(self.files), np.uint32)]),
            codes[order],
            np.concatenate([self.digests, earlier.digests[left]])[order],
            past[order],
            self.clients,
            (*earlier.changes, *([Change(round, changed)] if changed else [])),
        )

    def as_json(self) -> dict[str, Any]:
        """As `from_json` reads it: 11 bytes a row."""
        return {
            "files": list(self.files),
            "checksums": self.checksums.tolist(),
            "codes": _text(self.codes.astype("<i4")),
            "digests": _text(self.digests.astype("<u8")),
            "splits": _text(self.splits),
            "clients": list(self.clients),
            "changes": [dataclasses.asdict(change) for change in self.changes],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """What `as_json` made; ValueError where it has not."""
        checksums, files = np.array(values["checksums"], np.uint64), tuple(values["files"])
        codes, digests, splits = (_array(values[key], kind) for key, kind in _ARRAYS.items())
        if len(checksums) != len(files) or not len(codes) == len(digests) == len(splits):
            raise ValueError("its lists differ in length")
        if len(codes) and not 0 <= codes.min() <= codes.max() < len(files):
            raise ValueError("a row is in no file")
        return cls(
            files,
            checksums.astype(np.uint32),
            codes.astype(np.int64),
            digests,
            splits,
            tuple(values["clients"]),
            tuple(Change(change["round"], change["files"]) for change in values["changes"]),
        )


def together(records: Sequence[Record]) -> Record | None:
    """What several runs know, of which one starts from the others; None where there is none."""
    return reduce(_both, records) if records else None


def _both(one: Record, other: Record) -> Record:
    if one.as_json() == other.as_json():
        return one
    return Record(
        (*one.files, *other.files),
        np.concatenate([one.checksums, other.checksums]),
        np.concatenate([one.codes, other.codes + len(one.files)]),
        np.concatenate([one.digests, other.digests]),
        np.concatenate([one.splits, other.splits]),
        tuple(dict.fromkeys([*one.clients, *other.clients])),
        (*one.changes, *other.changes),
    )


def _written(items: Sequence[Any], name: str) -> tuple[Sequence[str], np.ndarray, np.ndarray]:
    """Of examples or pictures: the names of their files, the place of each one's file in these, and of each a checksum
    of how it is written (N,) uint32. `name` is that of what holds them, where no file is known."""
    if isinstance(items, Stored):
        used, codes = np.unique(items.codes, return_inverse=True)
        return [items.files[code] or name for code in used.tolist()], codes, items.checksums
    labels = np.array([getattr(item, "label", 0) for item in items], np.uint32)
    return [name], np.zeros(len(items), np.int64), common.digests(items).astype(np.uint32) ^ labels


def _below(name: str, whole: str) -> str:
    """The name of a file as it is seen from the folder in which all are."""
    return os.path.basename(name) if name == whole else name.removeprefix(os.path.join(whole, ""))


def _difference(now: np.ndarray, before: np.ndarray, earlier: Record) -> str:
    contents = np.unique(np.concatenate([now, before]))
    more = np.subtract(*(np.bincount(np.searchsorted(contents, own), minlength=len(contents)) for own in (now, before)))
    new, gone = int(more.clip(0).sum()), int((-more).clip(0).sum())
    known = int(more.clip(0)[earlier.splits_of(contents) > 0].sum())
    if not new and not gone:
        return "the same rows, in another order or spelling"
    of_new = f"{new} {'row is' if new == 1 else 'rows are'} new" if new else ""
    if known:
        of_new += f" here, {'but' if known == new else f'{known} of them'} known from elsewhere"
    rows = "" if new else "row " if gone == 1 else "rows "
    of_gone = f"{gone} {rows}{'is' if gone == 1 else 'are'} gone" if gone else ""
    return ", ".join(filter(None, (of_new, of_gone)))


def _named(names: Sequence[str], what: str) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return [f"{', '.join(names[:_NAMES])}{more} {'is' if len(names) == 1 else 'are'} {what}"]


_ARRAYS = {"codes": "<i4", "digests": "<u8", "splits": "u1"}
_MOST_BYTES = 2**30  # of one of these; a few bytes may unpack to any number


def _text(array: np.ndarray) -> str:
    return base64.b64encode(zlib.compress(array.tobytes(), 1)).decode()


def _array(text: str, kind: str) -> np.ndarray:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError("a list of rows is cut, or too long")
    return np.frombuffer(data, kind)
