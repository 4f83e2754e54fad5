"""FedDF: Ensemble Distillation for Robust Model Fusion in Federated Learning (Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from llm_fed.merge import mean
from llm_fed.method import Client, Message, Method, Server, State, Upload
from llm_fed.method.requests import Distillation
from llm_fed.settings import PositiveFloat, PositiveInt
from llm_fed.state.roles import Roles, Weights


@dataclass(frozen=True)
class FedDF(Method):
    """The mean of the models that arrived, weighted by numbers of examples, and then distilled from all of them: its
    predictions on the server's examples, without their labels, approach the models' mean logits.

    Clients upload the model itself. The server's examples may be of any domain. A round without uploads changes
    nothing.
    """

    paper: ClassVar[str] = "FedDF (Lin et al. 2020)"
    one_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"": Weights(changes=False)}

    server_epochs: PositiveInt = 1  # of distillation in each round
    server_lr: PositiveFloat = 1e-3  # of the run's local optimizer

    def init(self, server: Server) -> Message:
        server.need_examples("feddf", foreign=True)
        return server.initial()

    async def client_update(self, client: Client, message: Message) -> Message:
        return await client.fit(message)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        models = [upload.content for upload in uploads]
        student = mean(models, [upload.num_examples for upload in uploads])
        counters = {name: value for name, value in state.extras.items() if not value.is_floating_point()}
        student = State(student.layout, student.row, {**student.extras, **counters})  # none that a client made up
        optimizer = replace(server.optimizer, lr=self.server_lr)
        return await server.fit(student, epochs=self.server_epochs, optimizer=optimizer, loss=Distillation(models))
