"""What a run remembers of its data: in which split each row has been, so that no row is tested that was trained on, and
what has changed since.

A row is known by its digest (`common.digests`), and one byte says where it was. Rows that are gone stay known, as they
may come back.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import listed
from llm_fed.tasks import common
from llm_fed.tasks.common import ClientData, Example, Picture

TRAINING, VALIDATION, TEST = 1, 2, 4
SERVER = 8  # trained on by the server
HERE = 16  # the row is in the data now
_SPLITS = TRAINING | VALIDATION | TEST | SERVER
_NAMES = 5  # clients that a message names at most


class Change(NamedTuple):
    """What has changed in the data of a run while it went on."""

    round: int  # the last one that was trained on the data of before
    words: str


@dataclass(frozen=True, eq=False)
class Record:
    """The rows of a run's data (N)."""

    checksum: int  # of the rows that are HERE, as they are written and in their order
    digests: np.ndarray  # (N,) uint64
    splits: np.ndarray  # (N,) uint8, in which splits rows of this digest have been, and whether this one is HERE
    clients: tuple[str, ...]  # their names
    changes: tuple[Change, ...] = ()  # of the past

    @classmethod
    def of(cls, clients: Sequence[ClientData]) -> Record:
        """The rows of natural clients, all in the data and in no split yet."""
        items = [item for each in clients for part in each.splits.values() for item in part]
        digests, checksum = common.digests(items), 0
        for item, digest in zip(items, digests.tolist(), strict=True):
            written = dataclasses.replace(item, group="") if isinstance(item, Example) else item.label
            checksum = zlib.crc32(f"{digest} {written}".encode("utf-8", "surrogatepass"), checksum)
        names = tuple(client.client for client in clients)
        return cls(checksum, digests, np.full(len(digests), HERE, np.uint8), names)

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
            own = np.concatenate([np.empty(0, np.uint64), *map(common.digests, items)])
            splits[np.isin(self.digests, own)] |= bit
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

    def trained(self, *parts: Sequence[Example | Picture]) -> int:
        """How many of these examples say what one says that was trained on."""
        return sum(int((self.splits_of(common.digests(items)) & (TRAINING | SERVER) > 0).sum()) for items in parts)

    def checksum_of(self, split: int) -> str:
        """Of the rows that are in a split (VALIDATION or TEST) now, in whatever order."""
        chosen = (self.splits & (split | HERE)) == (split | HERE)
        return f"{zlib.crc32(np.sort(self.digests[chosen]).tobytes()):08x}"

    def since(self, earlier: Record) -> str:
        """Describes what differs from an earlier record of the data; empty where nothing does."""
        new = [client for client in self.clients if client not in set(earlier.clients)]
        gone = [client for client in earlier.clients if client not in set(self.clients)]
        said = [
            f"{listed(names, _NAMES)} {'is' if len(names) == 1 else 'are'} {what}"
            for what, names in (("new", new), ("gone", gone))
            if names
        ]
        clients = f"clients: {', '.join(said)}" if said else ""
        rows = "" if self.checksum == earlier.checksum else _difference(self._here, earlier._here)
        return "; ".join(filter(None, (clients, rows)))

    @property
    def _here(self) -> np.ndarray:
        return self.digests[self.splits & HERE > 0]

    def after(self, earlier: Record, round: int) -> Record:
        """This record with what an earlier one of the run knows, whose data were trained on up to `round`."""
        changed, left = self.since(earlier), ~np.isin(earlier.digests, self.digests)
        past = [self.splits | earlier.splits_of(self.digests), earlier.splits[left] & _SPLITS]
        return Record(
            self.checksum,
            np.concatenate([self.digests, earlier.digests[left]]),
            np.concatenate(past),
            self.clients,
            (*earlier.changes, *([Change(round, changed)] if changed else [])),
        )

    def as_json(self) -> dict[str, Json]:
        """The record as `from_json` reads it: 9 bytes a row."""
        packed = {}
        for key, array in (("digests", self.digests), ("splits", self.splits)):
            data = array.astype(_ARRAYS[key]).tobytes()
            packed[key] = base64.b64encode(zlib.compress(data, 1)).decode()
        changes = [change._asdict() for change in self.changes]
        return {"written": self.checksum, **packed, "clients": list(self.clients), "changes": changes}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Record:
        """What `as_json` made; ValueError where it has not."""
        digests, splits = (_array(values[key], kind) for key, kind in _ARRAYS.items())
        if len(digests) != len(splits):
            raise ValueError("its lists differ in length")
        changes = tuple(Change(change["round"], change["words"]) for change in values["changes"])
        return cls(values["written"], digests, splits, tuple(values["clients"]), changes)


def together(records: Sequence[Record]) -> Record | None:
    """What several runs know, of which one starts from the others; None where there is none."""
    return reduce(_both, records) if records else None


def _both(one: Record, other: Record) -> Record:
    if one.as_json() == other.as_json():
        return one
    return Record(
        zlib.crc32(b"%d" % other.checksum, one.checksum),
        np.concatenate([one.digests, other.digests]),
        np.concatenate([one.splits, other.splits]),
        tuple(dict.fromkeys([*one.clients, *other.clients])),
        (*one.changes, *other.changes),
    )


def _difference(now: np.ndarray, before: np.ndarray) -> str:
    contents = np.unique(np.concatenate([now, before]))
    more = np.subtract(*(np.bincount(np.searchsorted(contents, own), minlength=len(contents)) for own in (now, before)))
    counts = {"new": int(more.clip(0).sum()), "gone": int((-more).clip(0).sum())}
    said = [f"{count} {'row is' if count == 1 else 'rows are'} {what}" for what, count in counts.items() if count]
    return ", ".join(said) or "the same rows, in another order or spelling"


_ARRAYS = {"digests": "<u8", "splits": "u1"}
_MOST_BYTES = 2**30  # of one of these; a few bytes may unpack to any number


def _array(text: str, kind: str) -> np.ndarray:
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(base64.b64decode(text, validate=True), _MOST_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if inflater.unconsumed_tail or not inflater.eof:
        raise ValueError("a list of rows is cut, or too long")
    return np.frombuffer(data, kind)
