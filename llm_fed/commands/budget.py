"""How much a first run trains: enough to learn from the data that are there, and not more than that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Workload:
    """What a run does, as settings.

    Attributes:
        steps: optimizer steps of a client in a round.
        cohort: clients in a round.
        passes: over the training examples of a median client.
    """

    rounds: int
    steps: int
    batch: int
    cohort: int
    clients: int
    passes: float

    @property
    def participation(self) -> float:
        """The share of the clients in a round, rounded so that it stands for the same number of them."""
        share = self.cohort / self.clients
        return next(value for digits in range(2, 18) if math.ceil((value := round(share, digits)) * self.clients)
                    == self.cohort)  # fmt: skip

    @property
    def of_a_client(self) -> int:
        """Steps of a client in the whole run, on average."""
        return round(self.rounds * self.steps * self.cohort / self.clients)

    def alone(self) -> tuple[int, int]:
        """(rounds, steps) in which each client takes as many steps without the others, where all take part."""
        rounds = max(1, round(self.of_a_client / self.steps))
        return rounds, math.ceil(self.of_a_client / rounds)


@dataclass(frozen=True)
class Budget:
    """How work follows the data.

    Attributes:
        passes: over the training examples of a median client, in all.
        batch: examples per step.
        steps: least and most steps of a round, which is half a pass where that lies between them.
        rounds: least and most.
        all_of: up to so many clients take part in every round; of more, a tenth does.
        cohort: least and most clients in a round, where not all take part.
    """

    passes: float
    batch: int
    steps: tuple[int, int]
    rounds: tuple[int, int]
    all_of: int
    cohort: tuple[int, int]

    def work(self, sizes: Sequence[int], *, alone: bool = False) -> Workload:
        """The work for clients with so many training examples.

        Args:
            alone: whether each trains alone, so that all have to take part.
        """
        clients, middle = len(sizes), median(sizes)
        one_pass = max(1.0, middle / self.batch)  # in steps
        wanted = one_pass * self.passes
        cohort = clients if alone or clients <= self.all_of else _within(self.cohort, math.ceil(clients / 10))
        least, most = self.steps
        steps = _within(self.steps, math.ceil(max(min(one_pass / 2, most / 2), wanted / self.rounds[1])))
        rounds = _within(self.rounds, math.ceil(wanted * clients / (steps * cohort)))
        examples = min(self.batch, middle) * rounds * steps * cohort / clients
        return Workload(rounds, steps, self.batch, cohort, clients, examples / middle)


def _within(limits: tuple[int, int], number: int) -> int:
    return min(limits[1], max(limits[0], number))
