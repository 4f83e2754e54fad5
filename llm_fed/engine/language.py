"""The work that sites of a language model await, executed fused: training, and answers to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from torch import Tensor

from llm_fed.config import EvalConfig, LocalConfig
from llm_fed.engine import generation, inference
from llm_fed.engine.examples import TEXT
from llm_fed.engine.fused import FusedEngine, Requests
from llm_fed.engine.memory import budget_and_overhead, within_memory
from llm_fed.models.loading import Base
from llm_fed.state import State


class LanguageEngine(FusedEngine):
    """Answers the requests of sites whose examples are tokens."""

    base: Base

    def __init__(self, base: Base, local: LocalConfig, evaluation: EvalConfig):
        super().__init__(base, local, lambda structure: TEXT)
        self.evaluation = evaluation
        self.answers |= {
            "generate": self._generate, "options": self._options, "answer_losses": self._answer_losses,
            "features": self._features,
        }  # fmt: skip

    def _mix(self, structure: Any, asked: Sequence[tuple[State, Sequence[int]]]) -> Tensor | None:
        return inference.mixing_weights(self.base, asked) if structure.gate == "mix" else None

    def _features(self, requests: Requests) -> Sequence[Tensor]:
        prompts = [example.prompt for request in requests for example in request.payload]
        found = inference.features(self.base, prompts)
        return found.split([len(request.payload) for request in requests])

    def _generate(self, requests: Requests) -> Sequence[list[str]]:
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

    def _answer_losses(self, requests: Requests) -> Sequence[float]:
        """Of all clients in the same passes, as little memory as training takes being enough."""
        asked = [[query.example for query in request.payload[1]] for request in requests]
        prompts = [(request.payload[0], query.prompt) for request in requests for query in request.payload[1]]
        bank = self._bank(requests[0].key, [request.payload[0] for request in requests])
        mix = self._mix(requests[0].key, prompts)
        return within_memory(
            lambda budget: inference.mean_losses(self.base, bank, list(enumerate(asked)), mix=mix, budget=budget),
            self.budget or budget_and_overhead(self.base.model.device)[0],
        )

    def _options(self, requests: Requests) -> Sequence[list[list[float]]]:
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
