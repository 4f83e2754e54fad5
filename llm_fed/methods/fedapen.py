"""FedAPEN: Personalized Cross-silo Federated Learning with Adaptability to Statistical Heterogeneity (Qin, Deng, Zhao,
Yan; KDD 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn

from llm_fed.basics.rng import generator
from llm_fed.method import Client, Message, Method, Site, State, Structure
from llm_fed.method.losses import divergence
from llm_fed.models.joined import Answer
from llm_fed.settings import Above, Below, NonNegativeInt, PositiveFloat
from llm_fed.tasks.common import Picture, labels_of


@dataclass(frozen=True)
class FedAPEN(Method):
    """Each client's own model and a small one shared by all predict together: their logits are added with the weights
    lambda and 1 - lambda, which a client learns on a held-out part of its training examples.

    Learning for adaptability: the client trains lambda, starting from its last value, with both models frozen; the
    small one has just been averaged. Learning for ensemble: both models learn from the labels, from each other, and
    from the labels through their weighted sum, in which the other model is a constant. A client with a single example
    trains on it and does not change lambda.
    Deviation: the published code averages without weights; here they are n_k / n as in FedAvg
    (`test_the_mean_is_weighed_by_numbers_of_examples`).
    """

    paper: ClassVar[str] = "FedAPEN (Qin et al. 2023)"
    mean_only: ClassVar[bool] = True
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True
    shared: ClassVar[str] = r"^small\."

    # the share of a client's training examples on which lambda is learned, at least one
    adaptability: Annotated[float, Above(0), Below(1)] = 0.05
    weight_lr: PositiveFloat = 1e-3  # of SGD on lambda
    weight_epochs: NonNegativeInt = 10  # passes over those examples, each round

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.beside("own", "small", "logits")

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await self._weighed(client, message)
        _, rest = self.divided(client)
        loss = partial(ensemble_loss, float(theta["weights"][0]))
        theta = await client.fit(theta, train=r"^(own|small)\.", examples=rest, loss=loss)
        client.keep(theta, self.trained, message)
        return theta.select(self.shared) - message

    async def finish(self, client: Client, message: Message) -> None:
        theta = await self._weighed(client, message)
        client.memory["recipe"] = {"weight_of_own": round(float(theta["weights"][0]), 4)}

    async def personalize(self, client: Site, message: Message) -> Message:
        return await self._weighed(client, message)

    async def _weighed(self, client: Site, message: Message) -> State:
        """Both models, with a lambda that fits them."""
        theta = client.assemble(message)
        held, _ = self.divided(client)
        if not held:
            return theta
        parts = (await client.answers(theta, held)).parts
        weight = learned_weight(
            float(theta["weights"][0]), parts["own"].logits, parts["small"].logits, labels_of(held),
            lr=self.weight_lr, epochs=self.weight_epochs, batch_size=client.local.batch_size,
        )  # fmt: skip
        return theta.updated(State.of({"weights": theta.row.new_tensor([weight, 1 - weight])}))

    def divided(self, client: Site) -> tuple[list[Picture], list[Picture]]:
        """The examples on which lambda is learned, drawn from (seed, client) alone, and the others."""
        total = client.num_examples
        count = 0 if total < 2 else max(1, round(self.adaptability * total))
        order = torch.randperm(total, generator=generator(client.seed, "adaptability", client.id)).tolist()
        return [client.train[i] for i in order[:count]], [client.train[i] for i in order[count:]]


def learned_weight(
    weight: float, own: Tensor, small: Tensor, labels: Tensor, *, lr: float, epochs: int, batch_size: int
) -> float:
    """lambda in 0-1 after SGD on the cross-entropy of `lambda own + (1 - lambda) small`, logits (N, C) that are fixed.
    Its derivative by lambda is the mean of `<softmax(sum) - one_hot(label), own - small>`."""
    wanted = nn.functional.one_hot(labels, own.shape[1])
    for _ in range(epochs):
        for chosen in torch.arange(len(labels)).split(batch_size):
            apart = own[chosen] - small[chosen]
            missed = (small[chosen] + weight * apart).softmax(1) - wanted[chosen]
            weight = min(1.0, max(0.0, weight - lr * float((missed * apart).sum(1).mean())))
    return weight


def ensemble_loss(weight: float, answer: Answer, labels: Tensor, indices: Tensor) -> Tensor:
    """The sum of both models' losses; for each the other one is a constant."""
    own, small = answer.parts["own"].logits, answer.parts["small"].logits
    return _loss(weight, own, small, labels) + _loss(1 - weight, small, own, labels)


def _loss(weight: float, logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    together = weight * logits + (1 - weight) * other.detach()
    learned = nn.functional.cross_entropy(logits, labels) + nn.functional.cross_entropy(together, labels)
    return learned + divergence(logits, other).mean()
