"""The work that sites of a language model await, executed fused: training, and answers to prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

from torch import Tensor

from llm_fed.engine import generation, inference
from llm_fed.engine.answering import answers
from llm_fed.engine.examples import TEXT
from llm_fed.engine.fused import FusedEngine
from llm_fed.method.requests import AnswerLoss, Features, Generate, OptionScores
from llm_fed.models.loading import Base
from llm_fed.settings.config import EvalConfig
from llm_fed.state import State

Item = TypeVar("Item")


class LanguageEngine(FusedEngine):
    """Answers the requests of sites whose examples are tokens."""

    of = "adapters of a language model"
    base: Base

    def __init__(self, base: Base, evaluation: EvalConfig):
        super().__init__(base, lambda structure: TEXT)
        self.evaluation = evaluation

    def mixing_weights(self, structure: Any, asked: Sequence[tuple[State, Sequence[int]]]) -> Tensor | None:
        """See `inference.mixing_weights`; None unless the structure's gate is `mix`."""
        return inference.mixing_weights(self.base, asked) if structure.gate == "mix" else None

    def mixed_weights(self, structure: Any, asked: Sequence[tuple[State, Any]]) -> Tensor:
        return inference.mixing_weights(self.base, [(state, example.prompt) for state, example in asked])

    @answers(Features)
    def features(self, requests: Sequence[Features]) -> Sequence[Tensor]:
        prompts = [example.prompt for request in requests for example in request.examples]
        found = inference.features(self.base, prompts)
        return found.split([len(request.examples) for request in requests])

    @answers(Generate)
    def generate(self, requests: Sequence[Generate]) -> Sequence[list[str]]:
        structure, states = requests[0].structure, [request.state for request in requests]
        prompts = [(row, prompt) for row, request in enumerate(requests) for prompt in request.prompts]
        texts = generation.generate(
            self.base,
            self.bank(structure, states),
            prompts,
            max_new_tokens=self.evaluation.max_new_tokens,
            batch_size=self.evaluation.batch_size,
            mix=self.mixing_weights(structure, [(states[row], prompt) for row, prompt in prompts]),
        )
        return list(_shared_out(texts, [len(request.prompts) for request in requests]))

    @answers(AnswerLoss)
    def answer_losses(self, requests: Sequence[AnswerLoss]) -> Sequence[float]:
        """Of all clients in the same passes, as little memory as training takes being enough."""
        structure = requests[0].structure
        examples = [[query.example for query in request.queries] for request in requests]
        prompts = [(request.state, query.prompt) for request in requests for query in request.queries]
        bank, mix = (
            self.bank(structure, [request.state for request in requests]),
            self.mixing_weights(structure, prompts),
        )
        model = self.adapted(structure)
        return model.within_memory(
            lambda budget: inference.mean_losses(
                replace(model, budget=budget), bank, list(enumerate(examples)), mix=mix
            )
        )

    @answers(OptionScores)
    def option_scores(self, requests: Sequence[OptionScores]) -> Sequence[list[list[float]]]:
        structure, states = requests[0].structure, [request.state for request in requests]
        queries = [
            (row, query.prompt, list(query.options))
            for row, request in enumerate(requests)
            for query in request.queries
        ]
        scores = generation.option_log_likelihoods(
            self.base,
            self.bank(structure, states),
            queries,
            batch_size=self.evaluation.batch_size,
            mix=self.mixing_weights(structure, [(states[row], prompt) for row, prompt, _ in queries]),
        )
        return list(_shared_out(scores, [len(request.queries) for request in requests]))


def _shared_out(results: Iterable[Item], counts: Sequence[int]) -> Iterator[list[Item]]:
    """The first so many results, then the next so many, and so on."""
    remaining = iter(results)
    return (list(islice(remaining, count)) for count in counts)
