"""The work on adapters of an image model that sites await, executed fused: training, logits, features, heads.

Shape letters: N pictures, C classes, H features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics import signs
from llm_fed.engine import gradients
from llm_fed.engine.answering import answers, answers_each
from llm_fed.engine.examples import Pictures
from llm_fed.engine.fused import FusedEngine
from llm_fed.engine.inference import autocast, similarity_weights
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.method.requests import Features, FitHead, Gradient, Logits
from llm_fed.models.images import ImageBase
from llm_fed.models.joined import Answer, full, respond
from llm_fed.models.lora import Lora
from llm_fed.state import State
from llm_fed.tasks.common import Picture, labels_of, pixels_of


class ImageAdapterEngine(FusedEngine):
    """Answers the requests of sites whose examples are pictures and whose models are adapters and a head."""

    of = "adapters of an image model"
    base: ImageBase

    def __init__(self, base: ImageBase):
        super().__init__(base, self._pictures)
        self._kinds: dict[Lora, Pictures] = {}

    def _pictures(self, structure: Lora) -> Pictures:
        if structure not in self._kinds:
            self._kinds[structure] = Pictures.of(self.base, structure)
        return self._kinds[structure]

    @answers_each(Gradient)
    def gradient(self, request: Gradient) -> tuple[float, State]:
        """With another head, which is fixed, the gradient of the model's own head is zero."""
        structure: Any = request.structure
        kind = replace(self._pictures(structure), head=request.head)
        return gradients.mean_gradient(replace(self.adapted(structure), kind=kind), request)

    @answers(Logits)
    def logits(self, requests: Sequence[Logits]) -> Sequence[Tensor]:
        """(N, C) for each."""
        found = self._answer(requests[0].structure, [(request.state, request.examples) for request in requests])
        return found.logits.split([len(request.examples) for request in requests])

    @answers(Features)
    def features(self, requests: Sequence[Features]) -> Sequence[Tensor]:
        """(N, H) for each: what the head reads under the base alone."""
        pictures = [picture for request in requests for picture in request.examples]
        found = self._in_chunks(requests[0].structure, pictures, lambda part: nullcontext()).features
        return found.split([len(request.examples) for request in requests])

    @answers(FitHead)
    def heads(self, requests: Sequence[FitHead]) -> list[State]:
        """For each the linear head (weight, bias) that classifies the features of its pictures best."""
        found = self._answer(requests[0].structure, [(request.state, request.examples) for request in requests])
        each = found.features.split([len(request.examples) for request in requests])
        return [fit_head(features, request) for features, request in zip(each, requests, strict=True)]

    def _answer(self, structure: Any, asked: Sequence[tuple[State, Sequence[Picture]]]) -> Answer:
        """To all pictures one after another, each under the state beside which it stands."""
        pictures = [picture for _, pictures in asked for picture in pictures]
        index = torch.tensor([row for row, (_, pictures) in enumerate(asked) for _ in pictures])
        bank, mix = self.bank(structure, [state for state, _ in asked]), None
        if structure.gate == "mix":
            mix = self.mixed_weights(
                structure, [(asked[row][0], picture) for row, picture in zip(index.tolist(), pictures, strict=True)]
            )
        return self._in_chunks(
            structure, pictures, lambda part: bank.attached(index[part], mix=None if mix is None else mix[part])
        )

    def mixed_weights(self, structure: Any, asked: Sequence[tuple[State, Picture]]) -> Tensor:
        own = self._in_chunks(structure, [picture for _, picture in asked], lambda part: nullcontext()).features
        return similarity_weights(own, [state for state, _ in asked])

    @torch.inference_mode()
    def _in_chunks(
        self, structure: Any, pictures: Sequence[Picture], within: Callable[[slice], AbstractContextManager[None]]
    ) -> Answer:
        """In float32 at least, on the CPU."""
        kind, found = self._pictures(structure), []
        size = max(1, budget_and_overhead(self.base.device)[0] // kind.tokens)
        for at in range(0, len(pictures), size):
            inputs = self.base.prepare(pixels_of(pictures[at : at + size]))
            with within(slice(at, at + size)), autocast(self.base):
                found.append(respond(self.base.model, inputs, self.base.head))
            signs.answered(len(inputs))
        return Answer.joined(found).map(Tensor.cpu).map(full)


def fit_head(features: Tensor, asked: FitHead) -> State:
    """The linear head (weight, bias) trained, by Adam, on the features (N, H) of its examples."""
    features = features.to(asked.head.row)
    labels = labels_of(asked.examples)
    parameters = [nn.Parameter(tensor.clone()) for tensor in asked.head.tensors().values()]
    optimizer = torch.optim.Adam(parameters, lr=asked.lr)
    for batch in asked.batches:
        optimizer.zero_grad()
        chosen = torch.tensor(batch)
        logits = nn.functional.linear(features[chosen], *parameters)
        nn.functional.cross_entropy(logits, labels[chosen]).backward()
        optimizer.step()
    return State.of(dict(zip(asked.head, parameters, strict=True)))
