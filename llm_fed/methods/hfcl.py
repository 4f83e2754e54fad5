"""HFCL: Hybrid Federated and Centralized Learning (Elbir, Coleri, Mishra; EUSIPCO 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Method, Upload
from llm_fed.methods.fedft import need_examples
from llm_fed.site import Site
from llm_fed.wire import Message


@dataclass(frozen=True)
class HFCL(Method):
    """The server trains on its own examples as one more client, whose answer is never late.

    In the paper the server holds the data of clients that cannot train; here it has data of its own.
    """

    paper: ClassVar[str] = "HFCL (Elbir et al. 2021)"
    one_model: ClassVar[bool] = True

    def init(self, server: Site) -> Message:
        need_examples(server, "hfcl")
        return super().init(server)

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        own = Upload(server.id, server.num_examples, 0, await server.fit(state) - state)
        return await super().server_update(server, state, [*uploads, own])
