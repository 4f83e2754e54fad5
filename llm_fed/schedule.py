"""Who is asked in which round, and how late the answer is; drawn from a seed stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from llm_fed.errors import UserError
from llm_fed.rng import derive


@dataclass(frozen=True)
class Ask:
    """One client is asked in one round and its answer arrives `delay` rounds later (0: in the same round)."""

    client: str
    delay: int = 0


class Schedule(Protocol):
    """The cohort of each round. It depends on nothing that a method does, so methods are compared on equal cohorts."""

    def asks(self, round: int) -> list[Ask]:
        """The cohort of `round` (1, 2, ...), sorted by client order."""
        ...


@dataclass(frozen=True)
class Synchronous:
    """Each round samples `ceil(participation * m)` of the m clients without replacement; every answer arrives at
    once."""

    clients: Sequence[str]
    participation: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.participation <= 1:
            raise UserError(f"participation is {self.participation}; it must be above 0 and at most 1")

    @property
    def cohort_size(self) -> int:
        # The small slack keeps 0.1 * 30 = 3.0000000000000004 from asking a fourth client.
        return max(1, int(np.ceil(self.participation * len(self.clients) - 1e-9)))

    def asks(self, round: int) -> list[Ask]:
        draw = np.random.default_rng(derive(self.seed, "cohort", round))
        chosen = draw.choice(len(self.clients), size=self.cohort_size, replace=False)
        return [Ask(self.clients[index]) for index in sorted(chosen)]
