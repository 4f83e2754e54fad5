"""FFA-LoRA: Improving LoRA in Privacy-preserving Federated Learning (Sun, Li, Li, Ding; ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Method


@dataclass(frozen=True)
class FFA(Method):
    """A is drawn once, frozen, and the same for all clients; B is trained and averaged, so that B A is averaged
    exactly.

    A is never sent: each client draws it from the run's seed. An image model's head is trained and averaged like B.
    """

    paper: ClassVar[str] = "FFA-LoRA (Sun et al. 2024)"
    mean_only: ClassVar[bool] = True
    adapters_only: ClassVar[bool] = True
    trained: ClassVar[str] = r"^(?!.*\.lora_A$)"
    shared: ClassVar[str] = trained
