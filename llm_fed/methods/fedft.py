"""Fed+FT, a baseline of the Feddle paper: federated averaging, then fine-tuning on the server's data in each round;
and Center, the server's data alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llm_fed.method import Client, Message, Method, Server, Upload
from llm_fed.methods import waiting
from llm_fed.methods.waiting import Wait
from llm_fed.settings import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class FedFT(Method):
    """FedAvg's step on the updates that `wait` selects, then the server trains on its own examples; with `first_n` only
    in rounds that make a step."""

    paper: ClassVar[str] = "Fed+FT (baseline of Zhu et al. 2025)"
    one_model: ClassVar[bool] = True
    robust: ClassVar[bool] = True

    wait: Wait = "none"  # for which answers a step waits: none, deadline or first_n, see `waiting`
    server_epochs: PositiveInt = 1  # in each round
    server_lr: PositiveFloat = 1e-3  # of the run's local optimizer

    @property
    def mean_only(self) -> bool:  # type: ignore[override]
        return self.wait != "first_n"  # which counts answers by client

    def init(self, server: Server) -> Message:
        server.need_examples("fed+ft")
        return waiting.begun(server.initial(), self.wait)

    def broadcast(self, state: Message, client: str) -> Message:
        return waiting.model_of(state, self.wait)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        stepped = waiting.step(server, state, uploads, self.wait, server.cohort)
        if self.wait == "first_n" and stepped["since"] == state["since"]:
            return stepped
        model, optimizer = waiting.model_of(stepped, self.wait), replace(server.optimizer, lr=self.server_lr)
        tuned = await server.fit(model, epochs=self.server_epochs, optimizer=optimizer)
        return {**stepped, "model": tuned} if self.wait == "first_n" else tuned


@dataclass(frozen=True)
class Center(Method):
    """No federation: the server trains on its own examples, and clients only receive the result."""

    paper: ClassVar[str] = "centralised training (baseline of Zhu et al. 2025)"
    one_model: ClassVar[bool] = True

    server_epochs: PositiveInt = 1  # in each round
    server_lr: PositiveFloat = 1e-3  # of the run's local optimizer

    def init(self, server: Server) -> Message:
        server.need_examples("center")
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        return {}

    def upload_like(self, message: Message) -> Message:
        return {}

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        optimizer = replace(server.optimizer, lr=self.server_lr)
        return await server.fit(state, epochs=self.server_epochs, optimizer=optimizer)
