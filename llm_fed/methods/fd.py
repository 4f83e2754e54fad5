"""FD: Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under Non-IID Private
Data (Jeong, Oh, Kim, Park, Bennis, Kim 2018), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from llm_fed.method import Client, Message, Method, Server, Site, Upload
from llm_fed.method.heads import class_means, head_shape, own_model
from llm_fed.method.losses import divergence
from llm_fed.models.joined import Answer
from llm_fed.settings import NonNegativeFloat
from llm_fed.state.roles import Flags, Roles, Statistic
from llm_fed.tasks.common import labels_of


@dataclass(frozen=True)
class FD(Method):
    """Each client keeps its model and sends its mean logits per class; it learns from the labels, and from the mean
    logits of the other clients that have the class.

    The distance is the KL divergence of the predictions from the softmax of those logits, which is the paper's
    cross-entropy up to a constant. The server keeps the latest logits of every client. A class that no other client has
    adds nothing.
    Deviation: the logits are those of the trained model on all training examples, in evaluation mode; the paper
    averages the logits seen during training (`test_fd_sends_the_mean_logits_of_the_trained_model`).
    """

    paper: ClassVar[str] = "FD (Jeong et al. 2018)"
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"logits": Statistic(rows="seen"), "seen": Flags(some=True)}

    regularization: NonNegativeFloat = 1.0  # gamma: the weight of the distance

    def init(self, server: Server) -> Message:
        fresh = server.initial()
        classes, _ = head_shape(fresh)
        return {"newest": {}, "sum": fresh.row.new_zeros(classes, classes), "clients": torch.zeros(classes)}

    def broadcast(self, state: Message, client: str) -> Message:
        """The sum over all clients minus the client's own, divided by the number of the others that have the class."""
        total, clients, own = state["sum"], state["clients"], state["newest"].get(client)
        if own is not None:
            total, clients = total - own["logits"], clients - own["seen"].to(clients)
        seen = clients > 0
        return {"logits": seen[:, None] * total / clients.clamp(min=1)[:, None].to(total), "seen": seen}

    async def client_update(self, client: Client, message: Message) -> Message:
        loss = partial(self.loss, message["logits"], message["seen"])
        theta = client.memory["model"] = await client.fit(own_model(client), loss=loss)
        answers = (await client.answers(theta, client.train)).logits
        logits, counts = class_means(answers, labels_of(client.train), answers.shape[1])
        return {"logits": logits, "seen": counts > 0}

    def loss(self, logits: Tensor, seen: Tensor, answer: Answer, labels: Tensor, indices: Tensor) -> Tensor:
        """Cross-entropy, and the distance from the others' `logits` (C, C) where they have `seen` (C,) the class."""
        distances = divergence(answer.logits, logits.to(answer.logits)[labels]) * seen.to(labels.device)[labels]
        return nn.functional.cross_entropy(answer.logits, labels) + self.regularization * distances.mean()

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        newest = dict(sorted({**state["newest"], **{upload.client: upload.content for upload in uploads}}.items()))
        logits, seen = (torch.stack([sent[key] for sent in newest.values()]) for key in ("logits", "seen"))
        return {"newest": newest, "sum": logits.sum(0), "clients": seen.sum(0).to(state["clients"])}

    async def personalize(self, client: Site, message: Message) -> Message:
        return own_model(client)
