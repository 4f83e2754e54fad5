"""The work that sites of a language model await, executed fused: one frozen base, every row under its own adapter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from llm_fed import gradients, inference, training
from llm_fed.bank import AdapterBank
from llm_fed.cohort import Request
from llm_fed.config import EvalConfig, LocalConfig
from llm_fed.eval import generation
from llm_fed.models.loading import Base
from llm_fed.state import State
from llm_fed.training import Work


class LanguageEngine:
    """Answers the requests of sites whose examples are tokens; requests of one kind and structure share passes.

    Attributes:
        budget: most tokens of a micro-batch, found at the first training; it decides the packing, hence the bits.
        work: tokens, padding and micro-batches of all training so far.
    """

    def __init__(self, base: Base, local: LocalConfig, evaluation: EvalConfig):
        self.base, self.local, self.evaluation = base, local, evaluation
        self.work = Work()
        self.budget: int | None = None

    def execute(self, requests: Sequence[Request]) -> Sequence[Any]:
        """One result, or one exception, for each of these requests of equal kind and key."""
        return {
            "fit": self._fit,
            "generate": self._generate,
            "options": self._options,
            "losses": self._losses,
            "features": self._features,
            "moments": self._moments,
            "gradient": self._gradient,
        }[requests[0].kind](requests)

    def _fit(self, requests: Sequence[Request]) -> Sequence[Any]:
        jobs = [request.payload for request in requests]
        if len(jobs) > 1 and any(job.teachers for job in jobs):
            return [self._fit([request])[0] for request in requests]  # each has teachers of its own
        structure: Any = requests[0].key
        results, work = training.fit(
            self.base.model, structure, jobs, self.local, autocast=self.base.autocast, budget=self.budget
        )
        self.budget = work.budget or self.budget  # found once, then kept: the packing decides the bits of a result
        self.work = self.work.plus(work)
        return results

    def _bank(self, structure: Any, states: Sequence[State]) -> AdapterBank:
        bank = AdapterBank(self.base.model, structure, len(states), states[0].row.dtype)
        for row, state in enumerate(states):
            bank.load(row, state)
        return bank

    def _mix(self, structure: Any, asked: Sequence[tuple[State, Sequence[int]]]) -> Tensor | None:
        return inference.mixing_weights(self.base, asked) if structure.gate == "mix" else None

    def _losses(self, requests: Sequence[Request]) -> Sequence[list[float]]:
        """One client after another: each may ask for many states, and its examples fill micro-batches by themselves."""
        found = []
        for request in requests:
            states, examples = request.payload
            bank = self._bank(request.key, states)
            found.append(inference.mean_losses(self.base, bank, [(row, examples) for row in range(len(states))]))
        return found

    def _features(self, requests: Sequence[Request]) -> Sequence[Tensor]:
        prompts = [prompt for request in requests for prompt in request.payload]
        found = inference.features(self.base, prompts)
        return found.split([len(request.payload) for request in requests])

    def _moments(self, requests: Sequence[Request]) -> Sequence[Any]:
        structure: Any = requests[0].key
        jobs = [request.payload for request in requests]
        return gradients.evidence(self.base.model, structure, jobs, autocast=self.base.autocast, budget=self.budget)

    def _gradient(self, requests: Sequence[Request]) -> list[tuple[float, State]]:
        structure: Any = requests[0].key
        return [
            gradients.mean_gradient(
                self.base.model, structure, request.payload, autocast=self.base.autocast, budget=self.budget
            )
            for request in requests
        ]

    def _generate(self, requests: Sequence[Request]) -> Sequence[list[str]]:
        prompts = [(row, prompt) for row, request in enumerate(requests) for prompt in request.payload[1]]
        states = [request.payload[0] for request in requests]
        texts = iter(
            generation.generate(
                self.base,
                self._bank(requests[0].key, states),
                prompts,
                max_new_tokens=self.evaluation.max_new_tokens,
                batch_size=self.evaluation.batch_size,
                mix=self._mix(requests[0].key, [(states[row], prompt) for row, prompt in prompts]),
            )
        )
        return [list(islice(texts, len(request.payload[1]))) for request in requests]

    def _options(self, requests: Sequence[Request]) -> Sequence[list[list[float]]]:
        queries = [
            (row, query.prompt, list(query.options))
            for row, request in enumerate(requests)
            for query in request.payload[1]
        ]
        states = [request.payload[0] for request in requests]
        scores = iter(
            generation.option_log_likelihoods(
                self.base,
                self._bank(requests[0].key, states),
                queries,
                batch_size=self.evaluation.batch_size,
                mix=self._mix(requests[0].key, [(states[row], prompt) for row, prompt, _ in queries]),
            )
        )
        return [list(islice(scores, len(request.payload[1]))) for request in requests]
