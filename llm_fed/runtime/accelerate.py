"""Several processes under `accelerate launch`: rank 0 runs the experiment, and every rank executes a share of what its
clients await.

Only requests and results travel, so methods, the round loop and checkpoints know of one process. The other ranks keep
nothing that a run needs again: one may be continued with another number of ranks.
"""

from __future__ import annotations

import socket
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import distributed

from llm_fed.basics.errors import RunError, UserError
from llm_fed.method import Method
from llm_fed.method import requests as kinds
from llm_fed.method.requests import Executor, Request, Work
from llm_fed.method.site import Site
from llm_fed.runtime.launch import Ranks, connect
from llm_fed.runtime.portable import Codec, examples_of, fingerprint, packages_of
from llm_fed.settings.config import Config


@dataclass(frozen=True)
class Shared:
    """What every rank of a launch builds from one configuration."""

    engine: Executor
    examples: list[object]
    fingerprint: str  # equal on all ranks, or their results would be nonsense
    packages: tuple[str, ...] = ()  # of method and base, where they are from outside; see `portable`

    @classmethod
    def of(cls, engine: Executor, sites: Iterable[Site], base: Any, method: Method) -> Shared:
        examples = examples_of(sites)
        return cls(engine, examples, fingerprint(examples, base.model), packages_of(method, base))

    @property
    def codec(self) -> Codec:
        """For requests of the sites, and their results."""
        return Codec(self.examples, self.packages)


Build = Callable[[Config, Mapping[str, Any] | None], Shared]  # of a configuration, and what is known of its rows


class DistributedEngine:
    """An engine that spreads the requests it is given over all ranks, by estimated work.

    Args:
        config: from which the other ranks build what this one has built.
        known: what was known of the rows of its data, as JSON values.

    Raises:
        UserError, RunError: another rank cannot build it, or has built something else.
    """

    def __init__(self, ranks: Ranks, config: Config, shared: Shared, known: Mapping[str, Any] | None = None):
        self._work = Work()
        self._ranks, self._config, self._shared, self._known_rows = ranks, config, shared, known
        self._codec = shared.codec
        self._open()

    def _open(self) -> None:
        order = Codec().pack(["open", self._config, self._known_rows])
        self._ranks.opened = None
        for rank in range(1, self._ranks.size):
            self._ranks.send(rank, order)
        for rank, (host, theirs) in self._ranks.replies(Codec()).items():
            if theirs != self._shared.fingerprint:
                raise UserError(
                    f"rank {rank} on {host} has other examples or another base than rank 0; give all machines the same "
                    "files (base.revision says which version of a base of the Hub)"
                )
        self._ranks.opened = self

    def execute(self, requests: Sequence[Request[Any]]) -> list[Any]:
        """One result, or one exception, for each of these requests of one type and structure."""
        shares = split([max(1, cost(request)) for request in requests], self._ranks.size)
        if len(requests) > 1 and self._ranks.opened is not self:
            self._open()  # a run that this one needs was trained in between
        for rank, share in enumerate(shares):
            if rank and share:
                self._ranks.send(rank, self._codec.pack(["execute", [requests[i] for i in share]]))
        try:
            done = [(shares[0], *perform(self._shared.engine, [requests[i] for i in shares[0]]))]
        except Exception:
            with suppress(UserError, RunError):  # hear the others, who then wait for the next order
                self._ranks.replies(self._codec)
            raise
        done += [(shares[rank], *reply) for rank, reply in self._ranks.replies(self._codec).items()]
        answers: dict[int, Any] = {}
        for share, results, work in done:
            answers.update(zip(share, results, strict=True))
            self._work = self._work.plus(work)
        return [answers[i] for i in range(len(requests))]

    def take_work(self) -> Work:
        """The training work of all ranks since the last call."""
        taken, self._work = self._work, Work()
        return taken


class Worker:
    """What a rank above 0 does with the orders of rank 0."""

    def __init__(self, build: Build, rank: int):
        self._build, self._rank = build, rank
        self._engine: Executor | None = None
        self._codec = Codec()

    def answer(self, order: bytes) -> bytes | None:
        """The reply to one order; None where it is to stop."""
        name, *content = self._codec.unpack(order)
        if name == "stop":
            return None
        try:
            return self._codec.pack(self._open(*content) if name == "open" else perform(self._engine, *content))
        except (UserError, RunError) as error:
            return self._codec.pack(error)
        except Exception as error:
            traceback.print_exc()
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            return self._codec.pack(RunError(f"rank {self._rank} on {socket.gethostname()} failed: {reason}"))

    def _open(self, config: Config, known: Mapping[str, Any] | None) -> tuple[str, str]:
        self._engine, self._codec = None, Codec()  # two engines may not fit into memory
        shared = self._build(config, known)
        self._engine, self._codec = shared.engine, shared.codec
        return socket.gethostname(), shared.fingerprint


def serve_orders(build: Build) -> None:
    """Execute rank 0's orders until it says stop. RunError: rank 0 has gone."""
    channel = connect()
    assert channel and channel.rank, "only the ranks above 0 of a launch serve"
    worker = Worker(build, channel.rank)
    while (reply := worker.answer(channel.receive(0))) is not None:
        channel.send(0, reply)
    distributed.destroy_process_group()


def perform(engine: Executor | None, requests: Sequence[Request[Any]]) -> tuple[Sequence[Any], Work]:
    """The results, and the training work that they took."""
    if not requests:
        return [], Work()
    assert engine is not None
    return list(engine.execute(requests)), engine.take_work()


def split(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Which requests each part gets, in their order: the most expensive first, each to the part with the least so far
    (longest processing time first, Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        part = loads.index(min(loads))
        shares[part].append(i)
        loads[part] += costs[i]
    return [sorted(share) for share in shares]


def cost(request: Request[Any]) -> int:
    """Estimated work, to be compared with that of requests of the same type: tokens or pictures, times the states that
    they go through; of a generation the prompts, as nobody knows how long the answers will be."""
    match request:
        case kinds.Fit(examples=examples, batches=batches):
            sizes = [kinds.size_of(example) for example in examples]
            return sum(sizes[index] for indices in batches for index in indices) * (1 + len(request.teachers))
        case kinds.MeanLosses(states=states, examples=examples):
            return len(states) * sum(map(kinds.size_of, examples))
        case kinds.OptionScores(queries=queries) | kinds.AnswerLoss(queries=queries):
            return sum(map(kinds.size_of, queries))
        case kinds.Generate(prompts=prompts):
            return len(prompts)
    return sum(map(kinds.size_of, getattr(request, "examples", ())))
