"""FedProto: Federated Prototype Learning across Heterogeneous Clients (Tan, Long, Liu, Zhou, Lu, Jiang, Zhang; AAAI
2022), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server, Site, State, Upload
from llm_fed.method.heads import check_head, class_means, head_shape, own_model
from llm_fed.models.joined import Answer
from llm_fed.settings import NonNegativeFloat
from llm_fed.state.roles import Counts, Roles, Statistic
from llm_fed.tasks.common import labels_of

_NEVER = -1e9  # a class without a prototype is never the nearest


@dataclass(frozen=True)
class FedProto(Method):
    """Each client keeps its model and sends its mean features per class (prototypes); it learns from the labels, and
    its features are pulled towards the mean prototype of their class over the clients.

    A class without new uploads keeps its prototype; a class without a prototype adds nothing to the loss.
    Deviation: images are classified by the client's own head; the paper takes the class of the nearest prototype
    (`classifier: prototypes`).
    Deviation: the squared distance is the mean over the H features, as in the published code; the sum, which Eq. 7 may
    mean as well, is `regularization: H` (`test_fedproto_is_a_plain_loop`).
    Deviation: prototypes are weighted by their numbers of examples as in Eq. 6, but without its further division by the
    number of clients, which would shrink them; in the published code they have equal weights
    (`test_fedproto_weighs_by_examples`).
    Deviation: features are those of the trained model, in evaluation mode; the published code averages those of the
    last epoch's batches (`test_fedproto_sends_the_mean_features_of_the_trained_model`).
    """

    paper: ClassVar[str] = "FedProto (Tan et al. 2022)"
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"prototypes": Statistic(rows="counts"), "counts": Counts()}

    regularization: NonNegativeFloat = 1.0  # lambda of Eq. 7
    # head: the client's own; prototypes: the nearest of all clients' mean prototypes
    classifier: Literal["head", "prototypes"] = "head"

    def init(self, server: Server) -> Message:
        fresh = server.initial()
        shape = head_shape(fresh)
        return {"prototypes": fresh.row.new_zeros(shape), "known": torch.zeros(shape[0], dtype=torch.bool)}

    async def client_update(self, client: Client, message: Message) -> Message:
        start, prototypes = own_model(client), message["prototypes"]
        check_head(client, start, prototypes.shape)
        loss = partial(self.loss, prototypes, message["known"])
        theta = client.memory["model"] = await client.fit(start, loss=loss)
        features = (await client.answers(theta, client.train)).features
        means, counts = class_means(features, labels_of(client.train), len(prototypes))
        return {"prototypes": means, "counts": counts}

    def upload_like(self, message: Message) -> Message:
        return {"prototypes": message["prototypes"], "counts": message["known"].long()}

    def loss(self, prototypes: Tensor, known: Tensor, answer: Answer, labels: Tensor, indices: Tensor) -> Tensor:
        """Eq. 7: cross-entropy, and the distance of features from the `prototypes` (C, H) of classes `known` (C,)."""
        away = answer.features - prototypes.to(answer.features)[labels]
        held = known.to(labels.device)[labels]
        distance = (away.square().mean(1) * held).mean()
        return nn.functional.cross_entropy(answer.logits, labels) + self.regularization * distance

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        means, counts = (torch.stack([u.content[key] for u in uploads]) for key in ("prototypes", "counts"))
        total = counts.sum(0)
        share = counts.double() / total.clamp(min=1)  # (clients, C), Eq. 6
        mean = torch.einsum("kc,kch->ch", share.to(means), means)
        arrived = total > 0
        return {
            "prototypes": torch.where(arrived[:, None], mean, state["prototypes"]),
            "known": state["known"] | arrived,
        }

    async def personalize(self, client: Site, message: Message) -> Message:
        model = own_model(client)
        if self.classifier == "head":
            return model
        # argmin_c ||f - p_c||^2 = argmax_c <p_c, f> - ||p_c||^2 / 2, which a linear layer computes.
        prototypes, head = message["prototypes"], model.layout.head
        if f"{head}.bias" not in model.layout.slices:
            raise UserError("method.classifier=prototypes needs a head with a bias, and this model's has none")
        bias = torch.where(message["known"], -prototypes.square().sum(1) / 2, _NEVER)
        return model.updated(State.of({f"{head}.weight": prototypes, f"{head}.bias": bias.to(prototypes)}))
