"""Pooled training: what clients could reach if their rows might lie in one place. A control, and no federation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server, Upload


@dataclass(frozen=True)
class Pooled(Method):
    """A control and no method of federation: one adapter is trained on the rows of all clients in one place, with as
    many steps in each round as the clients that are asked would take together.

    Batches are drawn from all rows, with the clients' own batch size. `center` differs: it trains on the server's rows.
    """

    paper: ClassVar[str] = "pooled training (a control: all rows in one place, no federation)"
    one_model: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    def init(self, server: Server) -> Message:
        if not server.train:
            raise UserError("pooled trains on the rows of all clients, but the server was given none")
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        return {}

    def upload_like(self, message: Message) -> Message:
        return {}

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        steps = sum(server.local.steps_on(upload.num_examples) for upload in uploads)
        return await server.fit(state, steps=steps) if steps else state

    def describe(self, rounds: int) -> str:
        return f"{super().describe(rounds)}; a control: the rows of all clients in one place, no federation"
