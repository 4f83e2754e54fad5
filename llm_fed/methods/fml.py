"""FML: Federated Mutual Learning (Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from llm_fed.method import Client, Message, Method, Structure
from llm_fed.method.losses import divergence
from llm_fed.models.joined import Answer
from llm_fed.settings import AtLeast, AtMost


@dataclass(frozen=True)
class FML(Method):
    """Each client's own model and a small one shared by all learn from the labels and from each other (mutual
    distillation); the small one is averaged, and the client's own one predicts.

    Deviation: the published code averages without weights; here they are n_k / n as in FedAvg
    (`test_the_mean_is_weighed_by_numbers_of_examples`).
    """

    paper: ClassVar[str] = "FML (Shen et al. 2020)"
    mean_only: ClassVar[bool] = True
    whole_models: ClassVar[bool] = True
    any_model: ClassVar[bool] = True
    shared: ClassVar[str] = r"^small\."

    alpha: Annotated[float, AtLeast(0), AtMost(1)] = 0.5  # of the own model's loss the part of the labels
    beta: Annotated[float, AtLeast(0), AtMost(1)] = 0.5  # of the small model's

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.beside("own", "small", "first")

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(client.assemble(message), loss=self.loss)
        client.keep(theta, self.trained, message)
        return theta.select(self.shared) - message

    def loss(self, answer: Answer, labels: Tensor, indices: Tensor) -> Tensor:
        """The sum of both models' losses; each is the other's teacher, which learns nothing from that."""
        own, small = answer.parts["own"].logits, answer.parts["small"].logits
        return _mixed(self.alpha, own, small, labels) + _mixed(self.beta, small, own, labels)


def _mixed(share: float, logits: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    return share * nn.functional.cross_entropy(logits, labels) + (1 - share) * divergence(logits, other).mean()
