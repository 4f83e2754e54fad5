"""pFedMoE on LoRA: Data-Level Personalization with Mixture of Experts (Yi et al. 2024), in the form that the FedMerge
paper compares with (App. B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Method
from llm_fed.site import Site
from llm_fed.structure import Structure


@dataclass(frozen=True)
class PFedMoE(Method):
    """A global and a local adapter on each layer, weighed for each token by the client's own router.

    Everything is trained together; the global adapter is averaged, the local one and the routers stay.
    """

    paper: ClassVar[str] = "pFedMoE (Yi et al. 2024)"
    shared: ClassVar[str] = r"\.global\."

    def wrap(self, structure: Structure, client: Site | None) -> Structure:
        return structure.with_experts("global", "local", gate="router")
