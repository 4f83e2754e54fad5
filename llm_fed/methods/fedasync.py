"""FedAsync: Asynchronous Federated Optimization (Xie, Koyejo, Gupta; OPT 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from llm_fed.method import Client, Message, Method, Server, State, Upload, by_arrival
from llm_fed.settings import Above, AtMost, NonNegativeFloat
from llm_fed.state.roles import Roles, Weights


@dataclass(frozen=True)
class FedAsync(Method):
    """One adapter for all, which moves towards each trained adapter as it arrives, and less the staler that is.

    Clients upload the adapter itself, so the server need not remember what it sent to whom.
    Deviation, unless `staleness` is "steps": staleness is counted in rounds of virtual time, so that it means the same
    for every method (`test_fedasync_mixes_each_arrival_by_its_staleness`).
    """

    paper: ClassVar[str] = "FedAsync (Xie et al. 2020)"
    one_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"": Weights(changes=False)}

    mixing: Annotated[float, Above(0), AtMost(1)] = 0.4  # alpha
    staleness_exponent: NonNegativeFloat = 0.5  # a; 0: a late answer counts as much as any
    # since an answer's model was sent. rounds: of virtual time; steps: of the server, one per answer, as in the paper
    staleness: Literal["rounds", "steps"] = "rounds"

    def init(self, server: Server) -> Message:
        model = server.initial()
        # sent: by round, how many steps its model had seen
        return {"model": model, "sent": [0]} if self.staleness == "steps" else model

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"] if self.staleness == "steps" else state

    async def client_update(self, client: Client, message: Message) -> Message:
        return await client.fit(message)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        arrivals = by_arrival(server, uploads)
        if self.staleness == "rounds":
            return self._mix(state, [(upload.content, upload.staleness) for upload in arrivals])
        sent, made = state["sent"], state["sent"][-1]
        mixed = []
        for steps, upload in enumerate(arrivals, start=made):
            mixed.append((upload.content, steps - sent[server.round - 1 - upload.staleness]))
        return {"model": self._mix(state["model"], mixed), "sent": [*sent, made + len(arrivals)]}

    def _mix(self, model: State, arrivals: list[tuple[State, int]]) -> State:
        for arrival, staleness in arrivals:
            alpha = self.mixing * (staleness + 1) ** -self.staleness_exponent  # alpha_tau = alpha (tau + 1)^-a
            model = (1 - alpha) * model + alpha * arrival  # omega <- (1 - alpha_tau) omega + alpha_tau omega_i
        return model
