"""FedSA-LoRA: Selective Aggregation for Low-Rank Adaptation in Federated Learning (Guo et al., ICLR 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Method


@dataclass(frozen=True)
class FedSA(Method):
    """A and B are trained; A is averaged, while B and an image model's head stay with their client.

    The paper only mentions B; that the head stays is in the authors' configuration (`local_param`).
    """

    paper: ClassVar[str] = "FedSA-LoRA (Guo et al. 2025)"
    mean_only: ClassVar[bool] = True
    adapters_only: ClassVar[bool] = True
    shared: ClassVar[str] = r"\.lora_A$"
