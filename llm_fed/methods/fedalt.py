"""FedALT: Federated Fine-Tuning through Adaptive Local Training with Rest-of-World LoRA (Bian, Wang, Zhang, Xu; AAAI
2026)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Structure, Upload
from llm_fed.state import stack


@dataclass(frozen=True)
class FedALT(Method):
    """A client's own adapter, which is never averaged, is combined with the frozen mean of the other clients' adapters.

    A router (mixer) at the client weighs the two for each token. The server keeps the latest adapter of every client,
    and sends each client the mean over the others.
    An image model's head also stays at the client, since averaging would change what it learned with its own adapter.
    Deviation: the router starts at zero, with even weights; the published code draws it by Kaiming's rule.
    """

    paper: ClassVar[str] = "FedALT (Bian et al. 2026)"
    adapters_only: ClassVar[bool] = True
    trained: ClassVar[str] = r"^(?!.*\.rest\.)"

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.with_experts("own", "rest", gate="router")

    def init(self, server: Server) -> Message:
        return {"own": {}, "sum": server.initial().select(r"\.own\.") * 0.0}

    def broadcast(self, state: Message, client: str) -> Message:
        """RoW_k = (1 / (N - 1)) sum over j != k of own_j: one sum for all clients, minus the client's own."""
        own, total = state["own"].get(client), state["sum"]
        others = len(state["own"]) - (own is not None)
        rest = total if own is None else total - own
        # Of nobody else's adapters nothing is added to any layer, not even what rounding left of the difference.
        return (rest * (1 / others if others else 0.0)).renamed(".own.", ".rest.")

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(client.assemble(message), train=self.trained)
        client.keep(theta, self.trained, message)
        return theta.select(r"\.own\.")

    def upload_like(self, message: Message) -> Message:
        return message.renamed(".rest.", ".own.")

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        own = dict(sorted({**state["own"], **{upload.client: upload.content for upload in uploads}}.items()))
        return {"own": own, "sum": state["sum"].like(stack(own.values()).sum(0))}
