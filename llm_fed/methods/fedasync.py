"""FedAsync: Asynchronous Federated Optimization (Xie, Koyejo, Gupta; OPT 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.errors import UserError
from llm_fed.inbox import by_arrival
from llm_fed.method import Method, Upload
from llm_fed.site import Site
from llm_fed.wire import Message


@dataclass(frozen=True)
class FedAsync(Method):
    """One adapter for all, which every answer moves as it arrives: the later it is, the less.

    Clients upload the adapter itself, so the server need not remember what it sent to whom.
    Deviation: staleness is counted in rounds of virtual time, not in server steps, so that it means the same for every
    method (`test_fedasync_mixes_each_arrival_by_its_staleness`).
    """

    paper: ClassVar[str] = "FedAsync (Xie et al. 2020)"
    one_model: ClassVar[bool] = True

    mixing: float = 0.4  # alpha
    staleness_exponent: float = 0.5  # a; 0: a late answer counts as much as any

    def __post_init__(self) -> None:
        if not 0 < self.mixing <= 1:
            raise UserError(f"method.mixing is {self.mixing}; it must be above 0 and at most 1")
        if not self.staleness_exponent >= 0:
            raise UserError(f"method.staleness_exponent is {self.staleness_exponent}; it must be at least 0")

    async def client_update(self, client: Site, message: Message) -> Message:
        return await client.fit(message)

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        for upload in by_arrival(server, uploads):
            alpha = self.mixing * (upload.staleness + 1) ** -self.staleness_exponent  # alpha_tau = alpha (tau + 1)^-a
            state = (1 - alpha) * state + alpha * upload.content  # omega <- (1 - alpha_tau) omega + alpha_tau omega_i
        return state
