"""FedAsync: Asynchronous Federated Optimization (Xie, Koyejo, Gupta; OPT 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llm_fed.method import Client, Message, Method, Server, State, Upload, by_arrival
from llm_fed.settings import Above, AtMost, NonNegativeFloat
from llm_fed.state.roles import Roles, Weights


@dataclass(frozen=True)
class FedAsync(Method):
    """One adapter for all, which moves towards each trained adapter as it arrives, and less the staler that is.

    Clients upload the adapter itself, so the server need not remember what it sent to whom.
    Deviation: staleness is counted in rounds of virtual time and not in steps of the server, so that it means the same
    for every method (`test_fedasync_mixes_each_arrival_by_its_staleness`).
    """

    paper: ClassVar[str] = "FedAsync (Xie et al. 2020)"
    one_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"": Weights(changes=False)}

    mixing: Annotated[float, Above(0), AtMost(1)] = 0.4  # alpha
    staleness_exponent: NonNegativeFloat = 0.5  # a; 0: a late answer counts as much as any

    async def client_update(self, client: Client, message: Message) -> Message:
        return await client.fit(message)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        model: State = state
        for upload in by_arrival(server, uploads):
            alpha = self.mixing * (upload.staleness + 1) ** -self.staleness_exponent  # alpha_tau = alpha (tau + 1)^-a
            model = (1 - alpha) * model + alpha * upload.content  # omega <- (1 - alpha_tau) omega + alpha_tau omega_i
        return model
