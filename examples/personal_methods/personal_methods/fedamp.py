"""FedAMP: Personalized Cross-Silo Federated Learning on Non-IID Data (Huang, Chu, Zhou, Wang, Liu, Pei, Zhang; AAAI
2021), Algorithm 1."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server, Site, State, Upload
from llm_fed.settings import NonNegativeFloat, PositiveFloat


@dataclass(frozen=True)
class FedAMP(Method):
    """Each client has a model of its own, pulled towards a mixture of all clients' models in which those near to it
    count most.

    xi_ij = alpha A'(||w_i - w_j||^2) with A(x) = 1 - exp(-x / sigma), and what is left to 1 is the client's own share.
    The server keeps every client's model. It needs alpha (N - 1) <= sigma for N clients, so that no share is negative.
    Models' distances depend on their size and on `local`, so sigma has to be sought.
    """

    paper: ClassVar[str] = "FedAMP (Huang et al. 2021)"

    alpha: PositiveFloat = 0.05  # alpha_k, the same in all rounds; the paper lets it fall
    sigma: PositiveFloat = 1.0  # of A: at this squared distance a model counts 1 / e as much as at none
    strength: NonNegativeFloat = 0.01  # lambda of lambda / (2 alpha) ||w - u||^2

    def init(self, server: Server) -> Message:
        if server.local.proximal:
            raise UserError("fedamp has a proximal term of its own, of method.strength; leave local.proximal out")
        if self.alpha * (len(server.clients) - 1) > self.sigma:
            raise UserError(
                f"method.alpha={self.alpha:g} gives {len(server.clients) - 1} others a share of up to "
                f"{self.alpha / self.sigma:g} each, more than 1 together; lower it, or raise method.sigma"
            )
        return {"start": server.initial(), "models": {}}

    def broadcast(self, state: Message, client: str) -> Message:
        """u_i; a client that has not answered yet is sent the common start."""
        own = state["models"].get(client)
        if own is None:
            return state["start"]
        shares = self.shares(state["models"], client)
        mixed = own
        for name, share in shares.items():
            mixed = mixed + share * (state["models"][name] - own)
        return mixed

    def shares(self, models: dict[str, State], client: str) -> dict[str, float]:
        """xi_ij of all others j."""
        own = models[client].row.double()
        squares = {name: float((own - model.row.double()).square().sum()) for name, model in models.items()}
        return {
            name: self.alpha * math.exp(-square / self.sigma) / self.sigma
            for name, square in squares.items()
            if name != client
        }

    async def client_update(self, client: Client, message: Message) -> Message:
        pulled = replace(client.optimizer, proximal=self.strength / (2 * self.alpha), anchor=message)
        own = client.memory.get("model") or message
        client.memory["model"] = theta = await client.fit(own, optimizer=pulled)
        return theta

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        came = {upload.client: upload.content for upload in uploads}
        return {**state, "models": dict(sorted({**state["models"], **came}.items()))}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("model", message)

    def report(self, state: Message) -> dict[str, Any]:
        shares = {name: self.shares(state["models"], name) for name in state["models"]}
        return {"shares": {name: {k: float(f"{v:.6g}") for k, v in each.items()} for name, each in shares.items()}}
