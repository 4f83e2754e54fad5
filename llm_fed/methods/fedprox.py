"""FedProx: Federated Optimization in Heterogeneous Networks (Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith; MLSys
2020), Algorithm 2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, refuse_proximal
from llm_fed.settings import PositiveFloat


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term: a client's loss has mu / 2 * ||theta - theta_t||^2 added (Eq. 2), which keeps it
    near the model that it was sent. Every client trains for as many steps as `local` says.

    Deviation: clients are sampled uniformly and weighted by numbers of examples; the paper samples them by size and
    weights them equally (`test_fedprox_by_hand`).
    """

    paper: ClassVar[str] = "FedProx (Li et al. 2020)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True

    mu: PositiveFloat = 0.01  # the paper tries 0.001 to 1

    def init(self, server: Server) -> Message:
        refuse_proximal(server, "fedprox", "method.mu")
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        return await client.fit(message, optimizer=replace(client.optimizer, proximal=self.mu / 2)) - message
