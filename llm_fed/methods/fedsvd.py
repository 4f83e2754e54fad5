"""FedSVD: Adaptive Orthogonalization for Private Federated Learning with LoRA (Lee et al., NeurIPS 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.merge.factors import cut, rank_of
from llm_fed.merge.products import layers
from llm_fed.method import Client, Message, Method, Server, State, Upload, mean_update
from llm_fed.settings import PositiveInt

TRAINED = r"^(?!.*\.lora_A$)"


@dataclass(frozen=True)
class FedSVD(Method):
    """FFA-LoRA whose server updates A, too: clients train B beside a frozen A; the server averages B and replaces both
    factors by the singular value decomposition of B A: A becomes its right singular vectors, which are orthonormal, and
    B becomes U S.

    Clients receive both factors. An image model's head is trained and averaged like B.
    A late answer was trained with another A, so it is dropped.
    """

    paper: ClassVar[str] = "FedSVD (Lee et al. 2025)"
    one_model: ClassVar[bool] = True
    mean_only: ClassVar[bool] = True
    adapters_only: ClassVar[bool] = True
    robust: ClassVar[bool] = True
    trained: ClassVar[str] = TRAINED

    period: PositiveInt = 1  # rounds between two decompositions

    async def client_update(self, client: Client, message: Message) -> Message:
        theta = await client.fit(message, train=TRAINED)
        return theta.select(TRAINED) - message.select(TRAINED)

    def upload_like(self, message: Message) -> Message:
        return message.select(TRAINED)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        current = [upload for upload in uploads if upload.staleness == 0]
        if current:
            step = mean_update(server, current)
            state = state.updated(state.pick(list(step)) + step)
        return orthogonal(state) if server.round % self.period == 0 else state


def orthogonal(state: State) -> State:
    """The same products B A with orthonormal rows of A and B = U S. A layer whose B is zero stays as it is."""
    learned = {layer: (state[b], state[a]) for layer, a, b in layers(state) if bool(state[b].any())}
    return cut(state, state.tensors(), learned, rank_of(state)) if learned else state
