"""Who is asked in which round, and how late the answer is; drawn from seed streams of its own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from llm_fed.basics.rng import Secret, derive


@dataclass(frozen=True)
class Ask:
    """One client is asked in one round and its answer arrives `delay` rounds later (0: in the same round; None:
    never)."""

    client: str
    delay: int | None = 0


class Schedule(Protocol):
    """The cohort of each round. It depends on nothing that a method does, so methods are compared on equal cohorts."""

    @property
    def cohort_size(self) -> int:
        """The most clients that are asked in one round."""

    def asks(self, round: int) -> list[Ask]:
        """The cohort of `round` (1, 2, ...), sorted by client order."""


@dataclass(frozen=True)
class Poisson:
    """Each round asks each client with probability `participation`, independently, so perhaps nobody; every answer
    arrives at once. It is the sampling that accountants of differential privacy assume."""

    clients: Sequence[str]
    participation: float
    secret: Secret

    @property
    def cohort_size(self) -> int:
        return len(self.clients)

    def asks(self, round: int) -> list[Ask]:
        draws = self.secret.uniforms(len(self.clients), "cohort", round).tolist()
        return [Ask(client) for client, draw in zip(self.clients, draws, strict=True) if draw <= self.participation]


@dataclass
class Delayed:
    """Virtual time in rounds (Feddle paper, App. D): answers are late by half-normal delays, and some never arrive.

    Each round samples `ceil(participation * m)` of the m clients, or as many as there are, among those that are not at
    work: a client asked in round k with delay t is at work until its answer arrives in round k + t. An answer that
    never arrives occupies its client just as long. Sampling, delays and drop-outs are drawn from three seed streams.
    `sigma`: standard deviation, in rounds, of the normal draw x in delay = floor(|x|). `drop_out`: probability that an
    answer never arrives.
    """

    clients: Sequence[str]
    participation: float = 1.0
    seed: int = 0
    sigma: float = 0.0
    drop_out: float = 0.0
    # What follows from the settings, kept because a round's cohort depends on all rounds before it.
    _rounds: list[list[Ask]] = field(default_factory=list, init=False, repr=False, compare=False)
    _busy_until: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def cohort_size(self) -> int:
        return cohort_size(self.participation, len(self.clients))

    def asks(self, round: int) -> list[Ask]:
        while len(self._rounds) < round:
            self._rounds.append(self._next(len(self._rounds) + 1))
        return list(self._rounds[round - 1])

    def _next(self, round: int) -> list[Ask]:
        self._busy_until = {client: until for client, until in self._busy_until.items() if until >= round}
        busy = self._busy_until
        idle = [client for client in self.clients if client not in busy] if busy else self.clients
        asks = []
        for client in sample(self.seed, round, idle, self.cohort_size):
            delay = self._delay(round, client) if self.sigma else 0
            if delay:
                self._busy_until[client] = round + delay
            draws = np.random.default_rng(derive(self.seed, "drop-out", client, round))
            asks.append(Ask(client, None if draws.random() < self.drop_out else delay))
        return asks

    def _delay(self, round: int, client: str) -> int:
        draws = np.random.default_rng(derive(self.seed, "delay", client, round))
        return math.floor(abs(draws.normal(0, self.sigma)))


def most_asked(schedule: Schedule, rounds: int) -> int:
    """In how many of the first `rounds` rounds a client is asked: the largest number over the clients."""
    requested = Counter(ask.client for round in range(1, rounds + 1) for ask in schedule.asks(round))
    return max(requested.values(), default=0)


def cohort_size(participation: float, number: int) -> int:
    # The small slack keeps 0.28 * 25 = 7.000000000000001 from asking an eighth client.
    return max(1, math.ceil(participation * number - 1e-9))


def sample(seed: int, round: int, clients: Sequence[str], size: int) -> list[str]:
    """`size` of the clients, or all where they are fewer, in their order."""
    if not clients:
        return []
    draw = np.random.default_rng(derive(seed, "cohort", round))
    chosen = draw.choice(len(clients), size=min(size, len(clients)), replace=False)
    return [clients[index] for index in sorted(chosen)]
