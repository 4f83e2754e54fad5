"""Site: one party's data, memory and awaitable work. Each client is a Site; so is the server (its data may be
empty)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from llm_fed.bank import Lora
from llm_fed.cohort import Request
from llm_fed.config import LocalConfig
from llm_fed.errors import ClientError
from llm_fed.rng import derive, generator
from llm_fed.state import State
from llm_fed.tasks.common import Encoded
from llm_fed.training import Fitted, Job
from llm_fed.wire import Message


@dataclass(frozen=True)
class Query:
    """One example to be answered in an evaluation."""

    prompt: list[int]  # token ids after the template
    answers: tuple[str, ...]  # references
    options: tuple[list[int], ...] = ()  # token ids of each option, for scoring without generation
    correct: int = -1  # which option is right


@dataclass
class Site:
    """One party of the federation, as a method's client code sees it.

    `memory` is private to the site, survives rounds and is checkpointed; what is put there must be a message
    (`wire.pack`).
    """

    id: str
    structure: Lora
    local: LocalConfig
    seed: int
    draw: Callable[[torch.Generator], State]  # a fresh state of `structure`
    train: Sequence[Encoded] = ()
    queries: Mapping[str, Sequence[Query]] = field(default_factory=dict)  # by split: validation, test
    memory: dict[str, Message] = field(default_factory=dict)
    round: int = 0
    lr: float = 0.0
    losses: list[float] = field(default_factory=list)  # of this round's local steps, for the metrics

    @property
    def num_examples(self) -> int:
        """n_i: the number of training examples."""
        return len(self.train)

    def begin(self, round: int, lr: float) -> None:
        """Called by the loop before this site works in a round: random draws depend on (seed, round, site) alone."""
        self.round, self.lr, self.losses, self._fits = round, lr, [], 0

    def initial(self, *labels: str | int) -> State:
        """A fresh state, the same at every site; other `labels` give other draws (a soup's members, say)."""
        return self.draw(generator(self.seed, "initial", *labels))

    async def fit(
        self, state: State, *, train: str = r".*", steps: int | None = None, lr: float | None = None
    ) -> State:
        """Train from `state` on this site's examples with the run's `local` settings; awaitable, fused over the cohort.

        Args:
            state: where training starts; it is not changed.
            train: regular expression of the entries that are trained; the others stay as they are.
            steps: optimizer steps (default: `local.steps`, else `local.epochs` passes over the examples).
            lr: learning rate (default: this round's).

        Raises:
            ClientError: no example, or a loss that is not finite.
        """
        nth, self._fits = self._fits, self._fits + 1
        job = Job(
            client=self.id,
            start=state,
            batches=self.batches(steps, nth),
            lr=self.lr if lr is None else lr,
            train=train,
            seed=derive(self.seed, "dropout", self.round, self.id, nth),
        )
        fitted: Fitted = await Request("fit", self.id, self.structure, job)
        self.losses.extend(fitted.losses)
        return fitted.state

    def batches(self, steps: int | None = None, nth: int = 0) -> list[list[Encoded]]:
        """The examples of each optimizer step: shuffled epochs cut into batches, from (seed, round, site, nth)
        alone."""
        if not self.train:
            raise ClientError(f"client {self.id} has no training example")
        size = min(self.local.batch_size, len(self.train))
        per_epoch = -(-len(self.train) // size)
        total = steps if steps is not None else self.local.steps
        if total is None:
            total = (self.local.epochs or 1) * per_epoch
        draws = generator(self.seed, "batches", self.round, self.id, nth)
        chosen: list[list[Encoded]] = []
        while len(chosen) < total:
            order = torch.randperm(len(self.train), generator=draws).tolist()
            chosen += [[self.train[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
        return chosen[:total]

    async def generate(self, state: State, prompts: Sequence[list[int]]) -> list[str]:
        """Greedy answers to the prompts (token ids) under `state`; one batch serves several clients."""
        return await Request("generate", self.id, self.structure, (state, prompts))

    async def option_scores(self, state: State, queries: Sequence[Query]) -> list[list[float]]:
        """Per query the log-likelihood of each of its options under `state`, without generation."""
        return await Request("options", self.id, self.structure, (state, queries))
