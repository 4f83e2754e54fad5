"""FedIT (Zhang et al., ICASSP 2024) is FedAvg (McMahan et al., AISTATS 2017) on LoRA adapters; `fedlora` fine-tunes
its result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from llm_fed.method import Client, Message, Method, Server, Site, Upload, without_share
from llm_fed.method.heads import refuse_without_head
from llm_fed.methods import waiting
from llm_fed.methods.waiting import Wait
from llm_fed.settings import AtLeast, Below, PositiveFloat


@dataclass(frozen=True)
class FedIT(Method):
    """One adapter for all: every client trains it, and the server averages the results, weighted by numbers of
    examples.

    The server adds the weighted mean of the updates, which equals the weighted mean of the trained adapters, since all
    start from the same one. If answers are late, `wait` says which of them a step waits for; without delays all
    variants are the same.
    """

    paper: ClassVar[str] = "FedIT (Zhang et al. 2024), FedAvg (McMahan et al. 2017)"
    robust: ClassVar[bool] = True

    wait: Wait = "none"  # for which answers a step waits: none, deadline or first_n, see `waiting`
    private_head: bool = False  # of classifiers' adapters: each client trains and keeps a head of its own

    @property
    def mean_only(self) -> bool:  # type: ignore[override]
        return self.wait != "first_n"  # which counts answers by client

    @property
    def one_model(self) -> bool:  # type: ignore[override]
        return not self.private_head

    @property
    def adapters_only(self) -> bool:  # type: ignore[override]
        return self.private_head  # beside whole models nothing would be shared

    @property
    def shared(self) -> str:  # type: ignore[override]
        return r"\.lora_[AB]$" if self.private_head else r".*"

    def init(self, server: Server) -> Message:
        if self.private_head:
            refuse_without_head(self, server, "private_head")
        return waiting.begun(super().init(server), self.wait)

    def broadcast(self, state: Message, client: str) -> Message:
        return waiting.model_of(state, self.wait)

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        return waiting.step(server, state, uploads, self.wait, server.cohort)


@dataclass(frozen=True)
class FedLoRA(Method):
    """FedIT, after whose last round each client fine-tunes the result on its own data.

    The FedMerge paper calls this FedAvg+, or FedLoRA for adapters. The FedLoRA of Yi et al. (2023) is another method,
    for clients with different models, and is not available here.
    """

    paper: ClassVar[str] = "FedLoRA, or FedAvg+, in the sense of Chen et al. 2026"
    mean_only: ClassVar[bool] = True

    personal_share: Annotated[float, AtLeast(0), Below(1)] = 0.5  # of a client's steps, those of the fine-tuning
    personal_lr: PositiveFloat | None = None  # its learning rate; null: `local.lr`

    def together(self, rounds: int) -> int:
        return without_share(rounds, self.personal_share)

    async def finish(self, client: Client, message: Message) -> None:
        if not client.own_steps:
            return
        lr = client.local.lr if self.personal_lr is None else self.personal_lr
        optimizer = replace(client.optimizer, lr=lr)
        client.memory["personal"] = await client.fit(message, steps=client.own_steps, optimizer=optimizer)

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("personal", message)
