"""HFCL: Hybrid Federated and Centralized Learning (Elbir, Coleri, Mishra; EUSIPCO 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llm_fed.method import Message, Method, Server, State, Upload
from llm_fed.methods import waiting
from llm_fed.methods.waiting import Wait


@dataclass(frozen=True)
class HFCL(Method):
    """The server trains on its own examples as one more client, whose update is never late; `first_n` does not count
    it.

    In the paper the server holds the data of clients that cannot train; here it has its own data.
    """

    paper: ClassVar[str] = "HFCL (Elbir et al. 2021)"
    one_model: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    wait: Wait = "none"  # for which answers a step waits: none, deadline or first_n, see `waiting`

    @property
    def summed(self) -> Literal["examples"] | None:  # type: ignore[override]
        return None if self.wait == "first_n" else "examples"

    def init(self, server: Server) -> Message:
        server.need_examples("hfcl")
        return waiting.begun(server.initial(), self.wait)

    def broadcast(self, state: Message, client: str) -> Message:
        return waiting.model_of(state, self.wait)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if self.wait != "first_n":
            uploads = [*uploads, await self._own(server, state)]
        elif server.id not in state["deltas"]:  # once per model
            state = waiting.counted(state, await self._own(server, state["model"]))
        return waiting.step(server, state, uploads, self.wait, server.cohort + 1)

    async def _own(self, server: Server, model: State) -> Upload:
        """The server's answer to a model, as if a client had sent it."""
        return Upload(server.id, server.num_examples, 0, await server.fit(model) - model)
