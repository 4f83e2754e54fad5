"""FedPer: Federated Learning with Personalization Layers (Arivazhagan, Aggarwal, Singh, Choudhary 2019), Algorithms 1
and 2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server
from llm_fed.settings import PositiveInt
from personal_methods.layers import last_layers, others


@dataclass(frozen=True)
class FedPer(Method):
    """The last layers stay with their client and are trained together with the others, which are averaged, weighed by
    numbers of examples."""

    paper: ClassVar[str] = "FedPer (Arivazhagan et al. 2019)"
    mean_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    personal_layers: PositiveInt = 1  # K_P; the paper tries 1 to 4 blocks

    def init(self, server: Server) -> Message:
        model = server.initial()
        return model.select(others(last_layers(model, self.personal_layers)))

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(client.assemble(message))
        client.keep(theta, self.trained, message)
        return theta.select(others(last_layers(theta, self.personal_layers))) - message
