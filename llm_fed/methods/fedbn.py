"""FedBN: Federated Learning on Non-IID Features via Local Batch Normalization (Li, Jiang, Zhang, Kamp, Dou, ICLR
2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.basics.errors import UserError
from llm_fed.method import Client, Message, Method, Server
from llm_fed.state import State, module_of


@dataclass(frozen=True)
class FedBN(Method):
    """FedAvg of everything but the BatchNorm layers (Algorithm 1): their weights, biases and running statistics stay
    with their client. One that was never asked has fresh ones.

    Deviation: the mean is weighted by numbers of examples, as in FedAvg; in the published code it is not. BatchNorm is
    whatever has running statistics, in the published code whatever has `bn` in its name (`test_two_rounds_by_hand`,
    `test_what_travels_has_no_batchnorm`).
    """

    paper: ClassVar[str] = "FedBN (Li et al. 2021)"
    mean_only: ClassVar[bool] = True
    whole_models: ClassVar[bool] = True

    def init(self, server: Server) -> Message:
        return _shared(server.initial())

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(client.assemble(message))
        client.keep(theta, self.trained, message)
        return _shared(theta) - message


def _shared(state: State) -> State:
    """What travels: the entries of layers that have no running statistics. UserError: there is no layer that has."""
    layers = {module_of(name) for name in state.extras}
    if not layers:
        raise UserError(
            "fedbn keeps BatchNorm with its client, but base.name is a model without it; choose one that has it "
            "(resnet-9, say), or method=fedavg"
        )
    return state.pick([name for name in state if module_of(name) not in layers])
