"""Local training: each client alone. The baseline that every federation has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Site, Upload
from llm_fed.method.heads import own_model


@dataclass(frozen=True)
class Local(Method):
    """Each client trains its own adapter; nothing is shared (row "Local" of the POTARA paper's tables)."""

    paper: ClassVar[str] = "Local training (no federation)"
    any_model: ClassVar[bool] = True
    own_start: ClassVar[bool] = True
    any_rank: ClassVar[bool] = True

    def init(self, server: Server) -> Message:
        return None

    async def client_update(self, client: Client, message: Message) -> Message:
        client.memory["adapter"] = await client.fit(own_model(client, "adapter"))
        return None

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return None

    async def personalize(self, client: Site, message: Message) -> Message:
        return own_model(client, "adapter")
