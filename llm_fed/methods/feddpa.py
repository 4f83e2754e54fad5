"""FedDPA: Dual-Personalizing Adapter for Federated Foundation Models (Yang, Long, Shen, Jiang, Blumenstein; NeurIPS
2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from llm_fed.basics.rng import generator
from llm_fed.method import Client, Message, Method, Site, State, Structure, without_share
from llm_fed.models.lora import ANCHORS, SCALE
from llm_fed.settings import AtLeast, Below, NonNegativeFloat, PositiveInt

LOCAL, EVENLY = r"\.local\.", (0.5, 0.5)


@dataclass(frozen=True)
class FedDPA(Method):
    """A global adapter for all clients and a local one per client are mixed for each prompt: (1 - alpha) global + alpha
    local.

    alpha(x) is the mean cosine between the base's last hidden state at the end of the prompt and those of a few of the
    client's training prompts, times `mix_scale`, clipped to [0, 1]. For a picture x, it is the input of the base's
    head. An image model has a single head, which is trained and shared with the global adapter, so local training
    starts from what all clients have learned about the classes.
    Deviation: the local adapter is trained from the first round on; in the published code from the second.
    Deviation: the published code multiplies the global adapter by alpha, takes the hidden state with the local
    adapter on, and in its default setting sets alpha after generating; the paper's rule is followed
    (`test_feddpa_mixes_by_similarity`).
    """

    paper: ClassVar[str] = "FedDPA (Yang et al. 2024)"
    mean_only: ClassVar[bool] = True
    adapters_only: ClassVar[bool] = True
    looks: ClassVar[bool] = True  # personal models hold the hidden states of training prompts
    shared: ClassVar[str] = r"\.global\.|^(?!.*\.lora_)"

    # t: both are trained in turn each round; f: local ones after the last round, from the global
    variant: Literal["t", "f"] = "t"
    anchors: PositiveInt = 5  # S: how many training prompts a new prompt is compared with
    mix_scale: NonNegativeFloat = 0.5  # lambda
    personal_share: Annotated[float, AtLeast(0), Below(1)] = 0.5  # variant f: of a client's steps, the local adapter's

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.with_experts("global", "local", gate="mix")

    def together(self, rounds: int) -> int:
        return without_share(rounds, self.personal_share if self.variant == "f" else 0.0)

    async def client_update(self, client: Client, message: Message) -> Message:
        if self.variant == "t":
            await self._fit_local(client, client.assemble(message))
        return await client.fit(message, structure=client.structure.only("global")) - message

    async def finish(self, client: Client, message: Message) -> None:
        if client.own_steps:
            await self._fit_local(client, self._assemble(client, message), steps=client.own_steps)

    async def personalize(self, client: Site, message: Message) -> Message:
        draws = generator(client.seed, "anchors", client.id)
        chosen = torch.randperm(len(client.train), generator=draws)[: self.anchors]
        anchors = await client.features([client.train[i] for i in chosen.tolist()])
        mix = {ANCHORS: anchors, SCALE: torch.tensor(self.mix_scale)}
        state = self._assemble(client, message)
        return State(state.layout, state.row, mix)

    async def _fit_local(self, client: Client, start: State, steps: int | None = None) -> None:
        theta = await client.fit(start, train=LOCAL, steps=steps, mix=EVENLY)
        client.memory["own"] = theta.select(LOCAL)

    def _assemble(self, client: Site, message: State) -> State:
        """Both adapters; in variant f the local one is the global one until it is trained."""
        state = client.assemble(message)
        if self.variant == "f" and "own" not in client.memory:
            return state.updated(message.renamed(".global.", ".local."))
        return state
