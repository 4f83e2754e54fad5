"""Fed+FT, a baseline of the Feddle paper: federated averaging, then fine-tuning on the server's data in each round;
and Center, the server's data alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.errors import UserError
from llm_fed.messages.wire import Message
from llm_fed.method import Method, Upload
from llm_fed.methods.fedit import FedIT
from llm_fed.settings import PositiveFloat, PositiveInt
from llm_fed.site import Site


def need_examples(server: Site, method: str) -> None:
    """Raises UserError: the server has no example of its own."""
    if not server.train:
        raise UserError(f"{method} trains on the server's own examples, and it has none; set task.server.examples")
    if server.foreign:
        raise UserError(f"{method} needs server examples of the clients' own task; leave task.server.name out")


@dataclass(frozen=True)
class FedFT(FedIT):
    """FedAvg's step on the answers that `wait` chooses, then the server trains on its own examples; with `first_n` only
    in rounds that make a step."""

    paper: ClassVar[str] = "Fed+FT (baseline of Zhu et al. 2025)"
    server_trains: ClassVar[bool] = True

    server_epochs: PositiveInt = 1  # in each round
    server_lr: PositiveFloat = 1e-3  # of the run's local optimizer

    def init(self, server: Site) -> Message:
        need_examples(server, "fed+ft")
        return super().init(server)

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        stepped = await super().server_update(server, state, uploads)
        if self.wait != "first_n":
            return await self._tune(server, stepped)
        if stepped["since"] == state["since"]:
            return stepped
        return {**stepped, "model": await self._tune(server, stepped["model"])}

    async def _tune(self, server: Site, model: Message) -> Message:
        return await server.fit(model, epochs=self.server_epochs, lr=self.server_lr)


@dataclass(frozen=True)
class Center(Method):
    """No federation: the server trains on its own examples; clients are only sent the result."""

    paper: ClassVar[str] = "centralised training (baseline of Zhu et al. 2025)"
    one_model: ClassVar[bool] = True

    server_epochs: PositiveInt = 1  # in each round
    server_lr: PositiveFloat = 1e-3  # of the run's local optimizer

    def init(self, server: Site) -> Message:
        need_examples(server, "center")
        return server.initial()

    async def client_update(self, client: Site, message: Message) -> Message:
        return {}

    def upload_like(self, message: Message) -> Message:
        return {}

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        return await server.fit(state, epochs=self.server_epochs, lr=self.server_lr)
