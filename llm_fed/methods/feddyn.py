"""FedDyn: Federated Learning Based on Dynamic Regularization (Acar, Zhao, Matas, Mattina, Whatmough, Saligrama; ICLR
2021), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from llm_fed.method import Client, Message, Method, Server, Site, State, Upload, refuse_proximal
from llm_fed.settings import PositiveFloat


@dataclass(frozen=True)
class FedDyn(Method):
    """FedAvg with dynamic regularisation: a client's loss has -<g_k, theta> + alpha / 2 ||theta - theta_t||^2 added,
    where g_k is the gradient at the end of its previous training. In the limit clients and server then agree on one
    stationary point.

    All clients have equal weights. If an answer never arrives, the server's h is no longer the mean of the g_k.
    Deviation: alpha is the same for all clients; the published code divides it by the client's share of the examples
    (`test_feddyn_by_hand`).
    """

    paper: ClassVar[str] = "FedDyn (Acar et al. 2021)"
    robust: ClassVar[bool] = True
    summed: ClassVar[Literal["examples", "clients"] | None] = "clients"

    alpha: PositiveFloat = 0.01  # the paper tries 0.001 to 0.1

    def init(self, server: Server) -> Message:
        refuse_proximal(server, "feddyn", "method.alpha")
        model = server.initial()
        return {"model": model, "h": 0 * parameters(model)}

    def broadcast(self, state: Message, client: str) -> Message:
        return state["model"]

    async def client_update(self, client: Client, message: Message) -> Message:
        gradient = client.memory.get("gradient", 0 * parameters(message))
        optimizer = replace(client.optimizer, proximal=self.alpha / 2, correction=-1.0 * gradient)
        update = await client.fit(message, optimizer=optimizer) - message
        client.memory["gradient"] = gradient - self.alpha * parameters(update)
        return update

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads or not server.enough(len(uploads)):
            return state
        mean = server.average([upload.content for upload in uploads])
        h = state["h"] - self.alpha * len(uploads) / len(server.clients) * parameters(mean)
        model = state["model"] + mean
        return {"model": State(model.layout, model.row - h.row / self.alpha, model.extras), "h": h}

    async def personalize(self, client: Site, message: Message) -> Message:
        return message


def parameters(state: State) -> State:
    """The state without running statistics."""
    return state.pick(tuple(state))
