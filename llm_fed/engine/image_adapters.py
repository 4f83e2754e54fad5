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

from llm_fed import signs
from llm_fed.config import LocalConfig
from llm_fed.engine import gradients
from llm_fed.engine.examples import Pictures
from llm_fed.engine.fused import FusedEngine, Requests
from llm_fed.engine.inference import autocast, similarity_weights
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.models.images import ImageBase
from llm_fed.models.joined import Answer, full, respond
from llm_fed.models.lora import Lora
from llm_fed.requests import HeadJob
from llm_fed.state import State
from llm_fed.tasks.common import Picture, labels_of, pixels_of


class ImageAdapterEngine(FusedEngine):
    """Answers the requests of sites whose examples are pictures and whose models are adapters and a head."""

    base: ImageBase

    def __init__(self, base: ImageBase, local: LocalConfig):
        super().__init__(base, local, self._pictures)
        self._kinds: dict[Lora, Pictures] = {}
        self.answers |= {"logits": self._logits, "features": self._features, "head": self._head}

    def _pictures(self, structure: Lora) -> Pictures:
        if structure not in self._kinds:
            self._kinds[structure] = Pictures.of(self.base, structure)
        return self._kinds[structure]

    def _gradient(self, requests: Requests) -> list[tuple[float, State]]:
        """With another head, which is fixed, the gradient of the model's own head is zero."""
        found = []
        for request in requests:
            structure: Any = request.key
            how = self._how(structure)
            how["kind"] = replace(how["kind"], head=request.payload.head)
            found.append(gradients.mean_gradient(self.base.model, structure, request.payload, **how))
        return found

    def _logits(self, requests: Requests) -> Sequence[Tensor]:
        """(N, C) for each."""
        asked = [request.payload for request in requests]
        return self._answer(requests[0].key, asked).logits.split([len(pictures) for _, pictures in asked])

    def _features(self, requests: Requests) -> Sequence[Tensor]:
        """(N, H) for each: what the head reads under the base alone."""
        pictures = [picture for request in requests for picture in request.payload]
        found = self._in_chunks(requests[0].key, pictures, lambda part: nullcontext()).features
        return found.split([len(request.payload) for request in requests])

    def _head(self, requests: Requests) -> list[State]:
        """For each the linear head (weight, bias) that classifies the features of its pictures best."""
        jobs: list[HeadJob] = [request.payload for request in requests]
        found = self._answer(requests[0].key, [(job.state, job.examples) for job in jobs]).features
        each = found.split([len(job.examples) for job in jobs])
        return [fit_head(features, job) for features, job in zip(each, jobs, strict=True)]

    def _answer(self, structure: Any, asked: Sequence[tuple[State, Sequence[Picture]]]) -> Answer:
        """To all pictures one after another, each under the state beside which it stands."""
        pictures = [picture for _, pictures in asked for picture in pictures]
        index = torch.tensor([row for row, (_, pictures) in enumerate(asked) for _ in pictures])
        bank, mix = self._bank(structure, [state for state, _ in asked]), None
        if structure.gate == "mix":
            own = self._in_chunks(structure, pictures, lambda part: nullcontext()).features
            mix = similarity_weights(own, [asked[row][0] for row in index.tolist()])
        return self._in_chunks(
            structure, pictures, lambda part: bank.attached(index[part], mix=None if mix is None else mix[part])
        )

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


def fit_head(features: Tensor, job: HeadJob) -> State:
    """The job's linear head (weight, bias) trained, by Adam, on the features (N, H) of its examples."""
    features = features.to(job.head.row)
    labels = labels_of(job.examples)
    parameters = [nn.Parameter(tensor.clone()) for tensor in job.head.tensors().values()]
    optimizer = torch.optim.Adam(parameters, lr=job.lr)
    for batch in job.batches:
        optimizer.zero_grad()
        chosen = torch.tensor(batch)
        logits = nn.functional.linear(features[chosen], *parameters)
        nn.functional.cross_entropy(logits, labels[chosen]).backward()
        optimizer.step()
    return State.of(dict(zip(job.head, parameters, strict=True)))
