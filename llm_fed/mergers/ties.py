"""TIES-Merging: Resolving Interference When Merging Models (Yadav, Tam, Choshen, Raffel, Bansal; NeurIPS 2023),
Algorithm 1, for a federated and a local adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from llm_fed.basics.figures import rounded
from llm_fed.merge.products import factored
from llm_fed.mergers.parents import doubled, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import Above, AtMost, PositiveFloat, PositiveInt
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class Ties(Method):
    """The largest entries of both adapters' layer updates are kept; where their signs differ, the sign of the larger
    sum wins, and the mean of the entries with that sign is added, times `scaling`.

    Deviation: the largest entries of each layer are kept; the paper trims all layers together, which needs all dense
    differences at once (`test_ties_by_hand`).
    Deviation: the result has no low rank, so the nearest adapter of twice the rank is exported; `lost` in the recipe
    says how much is cut off (`test_what_a_product_loses`).
    """

    paper: ClassVar[str] = "TIES-Merging (Yadav et al. 2023)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True
    data_free: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    density: Annotated[float, Above(0), AtMost(1)] = 0.2  # k: the share of entries that is kept
    scaling: PositiveFloat = 1.0  # lambda

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure)

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        merged, lost = factored(fed, local, lambda layer, products: self.scaling * ties(products, self.density))
        client.memory["merged"] = merged
        client.memory["recipe"] = rounded({"density": self.density, "scaling": self.scaling, "lost": lost})

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]


def ties(differences: Tensor, density: float) -> Tensor:
    """The merged difference (P...) of n differences (n, P...)."""
    flat = differences.flatten(1)
    kept = max(1, round(density * flat.shape[1]))
    least = flat.abs().kthvalue(flat.shape[1] - kept + 1, dim=1, keepdim=True).values
    trimmed = torch.where(flat.abs() >= least, flat, 0.0)
    agree = (trimmed != 0) & (trimmed.sign() == trimmed.sum(0).sign())
    mean = torch.where(agree, trimmed, 0.0).sum(0) / agree.sum(0).clamp(min=1)
    return mean.view(differences.shape[1:])
