"""FedIT (Zhang et al., ICASSP 2024) is FedAvg (McMahan et al., AISTATS 2017) on LoRA adapters; FedLoRA fine-tunes its
result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from llm_fed.errors import UserError
from llm_fed.method import Method
from llm_fed.site import Site
from llm_fed.wire import Message


@dataclass(frozen=True)
class FedIT(Method):
    """One adapter for all: every client trains it, the server takes the mean weighted by numbers of examples.

    The server adds the weighted mean of the updates, which is the weighted mean of the trained adapters: all start
    equal.
    """

    paper: ClassVar[str] = "FedIT (Zhang et al. 2024), FedAvg (McMahan et al. 2017)"


@dataclass(frozen=True)
class FedLoRA(Method):
    """FedIT, and after the last round each client fine-tunes the result on its own data (FedAvg+ in the FedMerge
    paper)."""

    paper: ClassVar[str] = "FedLoRA (Yi et al. 2023), FedAvg+ (Chen et al. 2026)"

    personal_steps: int = 20  # optimizer steps of the fine-tuning after the last round
    personal_lr: float | None = None  # its learning rate; null: `local.lr`

    def __post_init__(self) -> None:
        if self.personal_steps < 1:
            raise UserError(f"method.personal_steps is {self.personal_steps}; it must be at least 1")
        if self.personal_lr is not None and not 0 < self.personal_lr < math.inf:
            raise UserError(f"method.personal_lr is {self.personal_lr}; it must be above 0 and finite, or null")

    async def finish(self, client: Site, message: Message) -> None:
        lr = client.local.lr if self.personal_lr is None else self.personal_lr
        client.memory["personal"] = await client.fit(message, steps=self.personal_steps, lr=lr)

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("personal", message)
