"""HFCL: Hybrid Federated and Centralized Learning (Elbir, Coleri, Mishra; EUSIPCO 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.messages.wire import Message
from llm_fed.method import Upload
from llm_fed.methods.fedft import need_examples
from llm_fed.methods.fedit import FedIT
from llm_fed.site import Site


@dataclass(frozen=True)
class HFCL(FedIT):
    """The server trains on its own examples as one more client, whose answer is never late; `first_n` does not count
    it.

    In the paper the server holds the data of clients that cannot train; here it has data of its own.
    """

    paper: ClassVar[str] = "HFCL (Elbir et al. 2021)"
    server_trains: ClassVar[bool] = True

    @property
    def mean_only(self) -> bool:  # type: ignore[override]
        return False  # the server's own answer is in the mean, too

    def init(self, server: Site) -> Message:
        need_examples(server, "hfcl")
        return super().init(server)

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        if self.wait != "first_n":
            own = Upload(server.id, server.num_examples, 0, await self._own(server, state))
            return await super().server_update(server, state, [*uploads, own])
        if server.id not in state["deltas"]:  # once per model
            deltas = {**state["deltas"], server.id: await self._own(server, state["model"])}
            state = {**state, "deltas": deltas, "sizes": {**state["sizes"], server.id: server.num_examples}}
        return await super().server_update(server, state, uploads)

    async def _own(self, server: Site, model: Message) -> Message:
        return await server.fit(model) - model

    def _enough(self, server: Site) -> int:
        return super()._enough(server) + 1
