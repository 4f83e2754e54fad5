"""FedEM on LoRA: Federated Multi-Task Learning under a Mixture of Distributions (Marfoq et al., NeurIPS 2021), in the
form that the FedMerge paper compares with (App. B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.errors import UserError
from llm_fed.method import Method
from llm_fed.site import Site
from llm_fed.structure import Structure


@dataclass(frozen=True)
class FedEM(Method):
    """d global adapters on each layer, weighed for each token by the client's own router.

    All adapters are sent to every client, trained together with its routers, and averaged one by one.
    Deviation: the paper's EM over mixture weights per example is replaced by routers, as the FedMerge paper does.
    """

    paper: ClassVar[str] = "FedEM (Marfoq et al. 2021)"
    shared: ClassVar[str] = r"\.lora_[AB]$"

    num_models: int = 4  # d; the FedMerge paper tries 2 to 12

    def __post_init__(self) -> None:
        if self.num_models < 1:
            raise UserError(f"method.num_models is {self.num_models}; it must be at least 1")

    def wrap(self, structure: Structure, client: Site | None) -> Structure:
        return structure.with_experts(*(f"expert{j}" for j in range(self.num_models)), gate="router")
