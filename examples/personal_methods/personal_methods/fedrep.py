"""FedRep: Exploiting Shared Representations for Personalized Federated Learning (Collins, Hassani, Mokhtari,
Shakkottai; ICML 2021), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Upload
from llm_fed.settings import PositiveInt
from personal_methods.layers import last_layers, others


@dataclass(frozen=True)
class FedRep(Method):
    """As FedPer, but a client trains its head first, with the representation fixed, and then the representation, with
    its head fixed, for as many steps as `local` says. The server takes the plain mean of the representations."""

    paper: ClassVar[str] = "FedRep (Collins et al. 2021)"
    mean_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    personal_layers: PositiveInt = 1  # the head
    head_steps: PositiveInt = 10  # tau: optimizer steps of the head in each round

    def init(self, server: Server) -> Message:
        model = server.initial()
        return model.select(others(last_layers(model, self.personal_layers)))

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = client.assemble(message)
        head = last_layers(theta, self.personal_layers)
        theta = await client.fit(theta, train=head, steps=self.head_steps)
        theta = await client.fit(theta, train=others(head))
        client.keep(theta, self.trained, message)
        return theta.select(others(head)) - message

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return state + server.average([upload.content for upload in uploads]) if uploads else state
