"""Ditto: Fair and Robust Federated Learning Through Personalization (Li, Hu, Beirami, Smith; ICML 2021), Algorithm
1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Site, refuse_proximal
from llm_fed.method.heads import own_model
from llm_fed.settings import NonNegativeFloat


@dataclass(frozen=True)
class Ditto(Method):
    """FedAvg for a global model, and a personal model at each client, which never leaves it and is pulled towards the
    global one by lambda / 2 ||v - w||^2 in its loss.

    A client takes twice as many steps as with FedAvg.
    Deviation: the two models train on different batches; in the published code, on the same (`test_ditto_by_hand`).
    """

    paper: ClassVar[str] = "Ditto (Li et al. 2021)"
    mean_only: ClassVar[bool] = True

    strength: NonNegativeFloat = 0.1  # lambda; 0: local training. The paper tries 0.05 to 2

    def init(self, server: Server) -> Message:
        refuse_proximal(server, "ditto", "method.strength")
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        trained = await client.fit(message)
        pulled = replace(client.optimizer, proximal=self.strength / 2, anchor=message)
        client.memory["personal"] = await client.fit(own_model(client, "personal"), optimizer=pulled)
        return trained - message

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("personal", message)
