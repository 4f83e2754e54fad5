"""The work on adapters that sites of every kind await, executed fused: one frozen base, every row under its own
adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from llm_fed.basics.errors import ClientError, UserError
from llm_fed.engine import fit, gradients, inference
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.answering import Answering, answers, answers_each
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import Kind
from llm_fed.merge.delta import under
from llm_fed.merge.moments import Evidence
from llm_fed.method.requests import ExpertWeights, Fit, Fitted, Gradient, GradientMoments, MeanLosses
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base
from llm_fed.models.lora import Lora
from llm_fed.state import State


class FusedEngine(Answering, ABC):
    """Answers the requests of sites that train adapters; requests of one type and structure share passes.

    Attributes:
        budget: most tokens of a micro-batch, found at the first training; it decides the packing, hence the bits.
    """

    def __init__(self, base: Base | ImageBase, kind_of: Callable[[Lora], Kind]):
        super().__init__()
        self.base, self.kind_of = base, kind_of
        self.budget: int | None = None

    def adapted(self, structure: Any) -> AdaptedModel:
        """The base under adapters of this structure."""
        kind = self.kind_of(structure)
        return AdaptedModel(self.base.model, structure, kind, self.base.autocast, self.budget, self.packing)

    @answers(Fit)
    def fit(self, requests: Sequence[Fit]) -> Sequence[Fitted | ClientError]:
        if any(callable(request.loss) for request in requests):
            raise UserError(
                "client.fit(loss=FUNCTION) needs whole image models; adapters train with cross-entropy or "
                "Distillation: leave it out, or set adapter=null"
            )
        if len(requests) > 1 and any(request.teachers for request in requests):
            return [self.fit([request])[0] for request in requests]  # each has teachers of its own
        if len({request.private is None for request in requests}) > 1:
            raise ValueError("fits with privacy and fits without it do not train in one pass")
        results, work = fit.fit(self.adapted(requests[0].structure), requests)
        self.budget = work.budget or self.budget  # found once, then kept: the packing decides the bits of a result
        self.work = self.work.plus(work)
        return results

    @answers_each(MeanLosses)
    def mean_losses(self, request: MeanLosses) -> list[float]:
        """Each client alone: it may ask for many states, and its examples fill micro-batches by themselves."""
        bank = self.bank(request.structure, request.states)
        asked = [(row, request.examples) for row in range(len(request.states))]
        return inference.mean_losses(self.adapted(request.structure), bank, asked)

    @answers(GradientMoments)
    def gradient_moments(self, requests: Sequence[GradientMoments]) -> Sequence[Evidence | ClientError]:
        if any(under(request.first) or under(request.second) for request in requests):
            raise UserError("gradient moments need plain adapters, but this method adds frozen weights beneath them")
        return gradients.evidence(self.adapted(requests[0].structure), requests)

    @answers_each(Gradient)
    def gradient(self, request: Gradient) -> tuple[float, State]:
        return gradients.mean_gradient(self.adapted(request.structure), request)

    @answers(ExpertWeights)
    def expert_weights(self, requests: Sequence[ExpertWeights]) -> Sequence[Tensor]:
        structure, states = requests[0].structure, [request.state for request in requests]
        asked = [(row, example) for row, request in enumerate(requests) for example in request.examples]
        model = self.adapted(structure)
        if model.structure.gate == "mix":
            found = self.mixed_weights(structure, [(states[row], example) for row, example in asked])
        else:
            bank = self.bank(structure, states)
            found = model.within_memory(
                lambda budget: inference.routed_weights(replace(model, budget=budget), bank, asked)
            )
        return found.split([len(request.examples) for request in requests])

    @abstractmethod
    def mixed_weights(self, structure: Any, asked: Sequence[tuple[State, Any]]) -> Tensor:
        """(len(asked), 2): the experts' weights by `inference.similarity_weights` for each example under the state
        beside which it stands."""

    def bank(self, structure: Any, states: Sequence[State]) -> AdapterBank:
        """One row for each of these states."""
        bank = AdapterBank(self.base.model, structure, len(states), states[0].row.dtype)
        for row, state in enumerate(states):
            bank.load(row, state)
        return bank
