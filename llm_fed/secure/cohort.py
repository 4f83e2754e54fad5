"""Cohort: who takes part in a round, and who is whose neighbour. Every client computes it from the same words."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

LEAST = 3  # clients: of a sum of two, each of them knows the other's part
CohortFields = dict[str, str | int | list[str]]  # a cohort as JSON
DEGREE = 100  # neighbours of a client; in a smaller cohort all others


def digest_of(*parts: str | int | Sequence[str]) -> bytes:
    """The SHA-256 of what JSON can hold."""
    return hashlib.sha256(json.dumps(parts, separators=(",", ":")).encode()).digest()


@dataclass(frozen=True)
class Cohort:
    """The clients that prepare a round. `number`: larger with each cohort of a run."""

    run: str
    number: int
    round: int
    names: tuple[str, ...]

    @classmethod
    def of(cls, says: CohortFields) -> Cohort:
        """Of what `says` gave, which another party may have made. ValueError: it is none."""
        said = says if isinstance(says, dict) else {}
        run, number, round, names = (said.get(key) for key in ("run", "number", "round", "names"))
        if not (isinstance(run, str) and type(number) is int and type(round) is int and isinstance(names, list)):
            raise ValueError("it is no cohort: something is missing, or no number")
        if not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
            raise ValueError("it is no cohort: a name is none, or stands twice")
        return cls(run, number, round, tuple(names))

    def says(self) -> CohortFields:
        return {"run": self.run, "number": self.number, "round": self.round, "names": list(self.names)}

    @cached_property
    def digest(self) -> bytes:
        return digest_of("cohort", self.run, self.number, self.round, self.names)

    @cached_property
    def _circle(self) -> list[str]:
        """In a small cohort the given order, else one that nobody chooses: of digests with the names."""
        if len(self.names) <= DEGREE + 1:
            return list(self.names)
        return sorted(self.names, key=lambda name: digest_of(self.digest.hex(), name))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._circle)}

    def group(self, name: str) -> list[str]:
        """A client and its neighbours, the nearest ones on the circle: a Harary graph, which is symmetric."""
        circle = self._circle
        if len(circle) <= DEGREE + 1:
            return circle
        index, half = self._places[name], DEGREE // 2
        return [circle[(index + away) % len(circle)] for away in range(-half, half + 1)]

    def point(self, holder: str, name: str) -> int:
        """Which of the shares of `name` is that of `holder`: 1, 2, ..."""
        if len(self._circle) <= DEGREE + 1:
            return self._places[holder] + 1
        return (self._places[holder] - self._places[name] + DEGREE // 2) % len(self._circle) + 1

    @property
    def threshold(self) -> int:
        """How many of a group, which is a client with its neighbours, open a secret. With two thirds of the group, two
        secrets are never both opened while less than a third of it are on the server's side."""
        return max(LEAST, math.ceil(2 * min(len(self.names), DEGREE + 1) / 3))

    def lacking(self, present: Collection[str]) -> str:
        """Why a sum cannot be opened with those that are present, in words; empty where it can."""
        if len(self.names) < LEAST:
            return f"a sum needs {LEAST} clients, as each of two knows the other's part, and {len(self.names)} are here"
        there = set(present)
        fewest = min((len(there.intersection(self.group(name))) for name in present), default=0)
        if fewest >= self.threshold:
            return ""
        of = "" if len(self.names) <= DEGREE + 1 else " beside one of them"
        return f"{fewest} of {min(len(self.names), DEGREE + 1)} clients have answered{of}, and {self.threshold} must"


@dataclass(frozen=True)
class Terms:
    """To what a cohort's masks belong; they cancel only between clients that were told the same.

    Args:
        present: who has prepared, in the cohort's order.
        message: the digest of what all of them are sent.
        largest: the largest number of examples with which a client counts.
        settings: the digest of all with which the client trains, and in which numbers it answers. Else a server could
            let all but one learn nothing, or in numbers too coarse to count.
    """

    cohort: Cohort
    present: tuple[str, ...]
    message: str
    largest: int
    settings: str = ""

    @cached_property
    def digest(self) -> bytes:
        return digest_of(self.cohort.digest.hex(), self.present, self.message, self.largest, self.settings)

    def neighbours(self, name: str) -> list[str]:
        """With whom a client shares masks."""
        return [other for other in self.cohort.group(name) if other != name and other in self._present]

    @cached_property
    def _present(self) -> frozenset[str]:
        return frozenset(self.present)


def signs(first: str, second: str) -> int:
    """+1 for the one of two clients that adds their mask, -1 for the one that subtracts it."""
    return 1 if first < second else -1
