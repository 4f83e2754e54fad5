"""FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation Models (Singhal, Ponkshe,
Vepakomma; ACL 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.merge import delta
from llm_fed.merge.factors import stacked
from llm_fed.merge.mean import mean
from llm_fed.method import Client, Message, Method, Server, Site, State, Structure, Upload
from llm_fed.methods import folded
from llm_fed.state import FACTORS
from llm_fed.state.roles import Echo, Roles


@dataclass(frozen=True)
class FedExLoRA(Method):
    """FedIT with an exact average: A and B are averaged, and the difference between the mean of the products and the
    product of the means is added to the base of all clients.

    The residual has rank (K - 1) r at most for K clients, and is sent as its factors if these are smaller than the
    layer. A client exports one adapter that includes the residuals. An image model's head is averaged.

    Deviation: means are weighted by n_k / n as in FedIT; in the authors' code all clients have equal weights
    (`test_fedex_adds_what_the_product_of_the_means_lacks`).
    """

    paper: ClassVar[str] = "FedEx-LoRA (Singhal et al. 2025)"
    adapters_only: ClassVar[bool] = True
    one_model: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"version": Echo()}

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.over_frozen()

    def init(self, server: Server) -> Message:
        model = server.initial()
        return {"model": model, **folded.begun(delta.nothing(model))}

    def broadcast(self, state: Message, client: str) -> Message:
        return {"model": state["model"], **folded.sent(state, client)}

    async def client_update(self, client: Client, message: Message) -> Message:
        whole = folded.received(client, message)
        theta = await client.fit(delta.beneath(message["model"], whole))
        folded.keep(client, message, whole)
        return folded.answer(message, theta)

    def upload_like(self, message: Message) -> Message:
        return folded.answer(message, message["model"])

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        uploads, adapters, examples = folded.answers(uploads)
        model = mean(adapters, examples)
        step = residual(adapters, examples, model, server.structure.scaling)
        return {"model": model, **folded.advanced(state, step, uploads)}

    async def personalize(self, client: Site, message: Message) -> Message:
        return delta.beneath(message["model"], folded.received(client, message))


def residual(adapters: list[State], examples: list[float], model: State, scaling: float) -> State:
    """`s (sum_k p_k B_k A_k - B A)` with B = sum_k p_k B_k and A = sum_k p_k A_k, as factors of the lowest rank.

    It is `s sum_k p_k (B_k - B) (A_k - A)`, and as the last p_k (B_k - B) is minus the sum of the others,
    `s sum over k < K of p_k (B_k - B) (A_k - A_K)`.
    """
    *others, last = adapters
    apart = []
    for each in others:
        names = {name: (model if name.endswith(FACTORS[1]) else last)[name] for name in each}
        apart.append(each - State.of(names))
    if not apart:
        return delta.nothing(model)
    total = sum(examples)
    return delta.of_pairs(stacked(apart, [scaling * n / total for n in examples[:-1]]), model)
