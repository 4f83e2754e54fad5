"""IFCA: An Efficient Framework for Clustered Federated Learning (Ghosh, Chung, Yin, Ramchandran; NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import generator
from llm_fed.method import Client, Json, Message, Method, Server, Site, State, Structure, Upload
from llm_fed.settings import NonNegativeInt, PositiveInt
from llm_fed.state.roles import Index, Roles, Weights


@dataclass(frozen=True)
class IFCA(Method):
    """d models at the server; each client is sent all and trains the one with the lowest loss on its own training data.

    Each model moves by the mean of the updates of the clients that chose it; a model that no client chose does not
    move.
    Deviation: fresh LoRA adapters (B = 0) all have the same loss, so in the first `warmup_rounds` the server assigns
    them at random and evenly, as the published code does for FEMNIST (`test_ifca_warm_up_spreads_the_clients`). Whole
    models, which differ from the start, need no such rounds: set 0.
    """

    paper: ClassVar[str] = "IFCA (Ghosh et al. 2020)"
    robust: ClassVar[bool] = True
    looks: ClassVar[bool] = True  # a client's choice of a model
    # Statistics as they are: the server's checks do not know of which model they would be the change.
    sends: ClassVar[Roles] = {"model": Index(), "delta": Weights(changes=False)}

    num_models: PositiveInt = 4  # d
    warmup_rounds: NonNegativeInt = 2  # 0, the paper's algorithm, is for whole models: they start different
    # compare losses on so many examples, in the paper on all
    choice_examples: Annotated[PositiveInt | None, "for all"] = None
    choice_data: Literal["train", "held-out"] = "train"  # train: the paper; held-out: the validation examples

    @property
    def without_held_out(self) -> str:  # type: ignore[override]
        return "they choose a model by their training examples" if self.choice_data == "held-out" else ""

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        if self.warmup_rounds < 1 < self.num_models and structure.fused:
            raise UserError(
                f"method.warmup_rounds is {self.warmup_rounds}; with adapters it must be at least 1, because fresh "
                "ones all have the same loss"
            )
        return structure

    def init(self, server: Server) -> Message:
        models = [server.initial(), *(server.initial("model", j) for j in range(1, self.num_models))]
        order = torch.randperm(len(server.clients), generator=generator(server.seed, "warm-up")).tolist()
        assigned = {server.clients[client]: index % self.num_models for index, client in enumerate(order)}
        return {"models": models, "assigned": assigned, "round": 0, "chosen": {}}

    def broadcast(self, state: Message, client: str) -> Message:
        warm_up = state["round"] < self.warmup_rounds
        return {"models": state["models"], "assigned": state["assigned"][client] if warm_up else None}

    async def client_update(self, client: Client, message: Message) -> Message:
        chosen = await self.choice(client, message)
        start = message["models"][chosen]
        theta = await client.fit(start)
        return {"model": chosen, "delta": State(theta.layout, theta.row - start.row, theta.extras)}

    def upload_like(self, message: Message) -> Message:
        return {"model": len(message["models"]) - 1, "delta": message["models"][0]}

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        models = list(state["models"])
        for j, model in enumerate(models):
            joined = [upload for upload in uploads if upload.content["model"] == j]
            if joined:
                deltas = [upload.content["delta"] for upload in joined]
                step = server.average(deltas, [upload.num_examples for upload in joined])
                statistics = {name: v for name, v in step.extras.items() if v.is_floating_point()}
                models[j] = State(model.layout, model.row + step.row, {**model.extras, **statistics})
        chosen = {**state["chosen"], **{upload.client: upload.content["model"] for upload in uploads}}
        return {**state, "models": models, "round": state["round"] + 1, "chosen": dict(sorted(chosen.items()))}

    def pool(self, state: Message) -> list[State]:
        return list(state["models"])

    async def personalize(self, client: Site, message: Message) -> Message:
        return message["models"][await self.choice(client, message)]

    def report(self, state: Message) -> dict[str, Json]:
        return {"chosen": state["chosen"]}

    async def choice(self, client: Site, message: Message) -> int:
        """The assigned model, or else the one with the lowest loss; ties are broken at random."""
        if message["assigned"] is not None:
            return int(message["assigned"])
        examples = client.train
        if self.choice_data == "held-out" and client.data.held_out:
            examples = client.sample(len(client.data.held_out), held_out=True)
        losses = await client.losses_of(message["models"], examples[: self.choice_examples])
        best = [j for j, loss in enumerate(losses) if loss == min(losses)]
        draws = generator(client.seed, "tie", client.round, client.id)
        return best[int(torch.randint(len(best), (1,), generator=draws))]
