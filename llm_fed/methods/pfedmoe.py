"""pFedMoE: Data-Level Personalization with Mixture of Experts (Yi et al. 2024), on whole image models, and on LoRA in
the form that the FedMerge paper compares with (App. B)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.method import Client, Method, Structure


@dataclass(frozen=True)
class PFedMoE(Method):
    """A global and a local expert, combined by the client's own gate; the global expert is averaged, the rest stays
    with the client.

    Whole models: the experts are extractors of the same architecture, weighted for each image, and the local model's
    head reads their features, as in FedMoE. Adapters: each layer has both experts, weighted for each token by a router.
    Everything is trained together. An image model's head stays at the client, like the paper's prediction header.
    """

    paper: ClassVar[str] = "pFedMoE (Yi et al. 2024)"
    mean_only: ClassVar[bool] = True
    shared: ClassVar[str] = r"(^|\.)global\."

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return structure.gated("local", "global")
