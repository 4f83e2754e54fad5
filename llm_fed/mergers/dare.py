"""DARE: Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch (Yu, Yu, Yu, Huang,
Li; ICML 2024), for a federated and a local adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from llm_fed.basics.figures import rounded
from llm_fed.basics.rng import generator
from llm_fed.merge.products import factored
from llm_fed.mergers.parents import doubled, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import AtLeast, Below, PositiveFloat, PositiveInt
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class Dare(Method):
    """Entries of the two adapters' layer updates are dropped at random and the rest rescaled to compensate; the sum of
    both is added, times `scaling` (with task arithmetic, as in the paper).

    Deviation: the result has no low rank, so the nearest adapter of twice the rank is exported; `lost` in the recipe
    says how much is cut off (`test_what_a_product_loses`).
    """

    paper: ClassVar[str] = "DARE (Yu et al. 2024)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True
    data_free: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    drop: Annotated[float, AtLeast(0), Below(1)] = 0.5  # p; the paper goes up to 0.99
    scaling: PositiveFloat = 0.5  # of the sum; 0.5 is the mean of the two

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure)

    async def finish(self, client: Client, message: Message) -> None:
        def rule(layer: str, products: Tensor) -> Tensor:
            draws = generator(client.seed, "drop", client.id, layer)
            kept = torch.rand(products.shape, generator=draws).to(products.device) >= self.drop
            return self.scaling * (kept * products).sum(0) / (1 - self.drop)

        fed, local = (client.given[name] for name in self.needs)
        client.memory["merged"], lost = factored(fed, local, rule)
        client.memory["recipe"] = rounded({"drop": self.drop, "scaling": self.scaling, "lost": lost})

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]
