"""FedEM: Federated Multi-Task Learning under a Mixture of Distributions (Marfoq, Neglia, Bellet, Kameni, Vidal; NeurIPS
2021), on whole image models, and on LoRA in the form that the FedMerge paper compares with (App. B)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from llm_fed.method import Client, Message, Method, State, Structure
from llm_fed.models.joined import Answer
from llm_fed.settings import PositiveInt


@dataclass(frozen=True)
class FedEM(Method):
    """d global models, mixed with weights of the client's own; all are sent to every client, and each is averaged
    separately.

    Whole models: expectation-maximisation (Algorithm 1). A client's mixture weights pi stay at the client and weigh the
    models' probabilities; they are uniform for a client that never took part.
    Adapters: each layer has d of them, weighted for each token by the client's own router, and all are trained
    together. An image model has one head for the mixture, so it is trained and averaged with the adapters.
    Deviation: for adapters, routers replace EM over mixture weights per example, as in the FedMerge paper.
    """

    paper: ClassVar[str] = "FedEM (Marfoq et al. 2021)"
    mean_only: ClassVar[bool] = True
    shared: ClassVar[str] = r"^(?!weights$|.*\.router$)"

    num_models: PositiveInt = 4  # d; the FedMerge paper tries 2 to 12

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.mixture(*(f"expert{j}" for j in range(self.num_models)))

    async def client_update(self, client: Client, message: Message) -> Message:
        if client.structure.fused:
            return await super().client_update(client, message)
        state = client.assemble(message)
        labels = torch.tensor([picture.label for picture in client.train])
        q = posterior(await client.answers(state, client.train), labels, state["weights"])
        state = state.updated(State.of({"weights": q.mean(0)}))
        theta = await client.fit(state, train=self.shared, loss=partial(expected_loss, q))
        client.keep(theta, self.trained, message)
        return theta.select(self.shared) - message


def posterior(answer: Answer, labels: Tensor, weights: Tensor) -> Tensor:
    """q (N, d): `q_s(m)`, proportional to `pi_m exp(-loss_m(s))`, of N examples under d models and their weights pi
    (d,): the E-step."""
    return (weights.log() - losses(answer, labels)).softmax(1)


def expected_loss(q: Tensor, answer: Answer, labels: Tensor, indices: Tensor) -> Tensor:
    """The mean over a batch of `sum_m q_s(m) loss_m(s)`, the M-step: each model takes the steps that it would alone.
    `q`: of all training examples, (N, d)."""
    return (q.to(labels.device)[indices] * losses(answer, labels)).sum(1).mean()


def losses(answer: Answer, labels: Tensor) -> Tensor:
    """(N, d): the cross-entropy of each example under each model."""
    each = [functional.cross_entropy(part.logits, labels, reduction="none") for part in answer.parts.values()]
    return torch.stack(each, 1)
