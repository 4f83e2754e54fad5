"""The work on adapters that sites of every kind await, executed fused: one frozen base, every row under its own
adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llm_fed.config import LocalConfig
from llm_fed.engine import fit, gradients, inference
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import Kind
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base
from llm_fed.models.lora import Lora
from llm_fed.requests import Request, Work
from llm_fed.state import State

Requests = Sequence[Request]


class FusedEngine:
    """Answers the requests of sites that train adapters; requests of one kind and structure share passes.

    Attributes:
        budget: most tokens of a micro-batch, found at the first training; it decides the packing, hence the bits.
        work: tokens, padding and micro-batches of all training so far.
        answers: what answers the requests of each kind.
    """

    def __init__(self, base: Base | ImageBase, local: LocalConfig, kind_of: Callable[[Lora], Kind]):
        self.base, self.local, self.kind_of = base, local, kind_of
        self.work = Work()
        self.budget: int | None = None
        self.answers: dict[str, Callable[[Requests], Sequence[Any]]] = {
            "fit": self._fit, "losses": self._losses, "moments": self._moments, "gradient": self._gradient
        }  # fmt: skip

    def execute(self, requests: Requests) -> Sequence[Any]:
        """One result, or one exception, for each of these requests of equal kind and key."""
        return self.answers[requests[0].kind](requests)

    def _fit(self, requests: Requests) -> Sequence[Any]:
        jobs = [request.payload for request in requests]
        if len(jobs) > 1 and any(job.teachers for job in jobs):
            return [self._fit([request])[0] for request in requests]  # each has teachers of its own
        structure: Any = requests[0].key
        results, work = fit.fit(self.base.model, structure, jobs, self.local, **self._how(structure))
        self.budget = work.budget or self.budget  # found once, then kept: the packing decides the bits of a result
        self.work = self.work.plus(work)
        return results

    def _losses(self, requests: Requests) -> Sequence[list[float]]:
        """One client after another: each may ask for many states, and its examples fill micro-batches by themselves."""
        found = []
        for request in requests:
            structure: Any = request.key
            states, examples = request.payload
            bank, asked = self._bank(structure, states), [(row, examples) for row in range(len(states))]
            found.append(inference.mean_losses(self.base, bank, asked, kind=self.kind_of(structure)))
        return found

    def _moments(self, requests: Requests) -> Sequence[Any]:
        structure: Any = requests[0].key
        jobs = [request.payload for request in requests]
        return gradients.evidence(self.base.model, structure, jobs, **self._how(structure))

    def _gradient(self, requests: Requests) -> list[tuple[float, State]]:
        structure: Any = requests[0].key
        return [
            gradients.mean_gradient(self.base.model, structure, request.payload, **self._how(structure))
            for request in requests
        ]

    def _bank(self, structure: Any, states: Sequence[State]) -> AdapterBank:
        bank = AdapterBank(self.base.model, structure, len(states), states[0].row.dtype)
        for row, state in enumerate(states):
            bank.load(row, state)
        return bank

    def _how(self, structure: Lora) -> dict[str, Any]:
        return {"kind": self.kind_of(structure), "autocast": self.base.autocast, "budget": self.budget}
