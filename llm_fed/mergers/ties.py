"""TIES-Merging: Resolving Interference When Merging Models (Yadav, Tam, Choshen, Raffel, Bansal; NeurIPS 2023),
Algorithm 1, for a federated and a local adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from llm_fed.basics.names import rounded
from llm_fed.merge.products import factored, weighed
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.settings import Above, AtMost, PositiveFloat
from llm_fed.state import State


@Merger(paper="TIES-Merging (Yadav et al. 2023)", data_free=True, doubles=True)
def ties(
    client: Client,
    fed: State,
    local: State,
    *,
    density: Annotated[float, Above(0), AtMost(1)] = 0.2,  # k: the share of entries that is kept
    scaling: PositiveFloat = 1.0,  # lambda
) -> Merged:
    """The largest entries of both adapters' layer updates are kept; where their signs differ, the sign of the larger
    sum wins, and the mean of the entries with that sign is added, times `scaling`.

    Deviation: the largest entries of each layer are kept; the paper trims all layers together, which needs all dense
    differences at once (`test_ties_by_hand`).
    Deviation: the result has no low rank, so the nearest adapter of twice the rank is exported; `lost` in the recipe
    says how much is cut off (`test_what_a_product_loses`).
    """
    merged, lost = factored([fed, local], lambda layer, products: scaling * elected(products, density))
    return merged, rounded({"density": density, "scaling": scaling, "lost": lost})


def ties_of(
    states: Sequence[State], weights: Sequence[float], *, density: float = 0.2, rank: int | None = None
) -> tuple[State, float]:
    """TIES of any number of adapters, each multiplied by its weight, and how much a lower rank loses."""
    return factored(states, lambda layer, products: elected(weighed(products, weights), density), rank)


def elected(differences: Tensor, density: float) -> Tensor:
    """The merged difference (P...) of n differences (n, P...)."""
    flat = differences.flatten(1)
    kept = max(1, round(density * flat.shape[1]))
    least = flat.abs().kthvalue(flat.shape[1] - kept + 1, dim=1, keepdim=True).values
    trimmed = torch.where(flat.abs() >= least, flat, 0.0)
    agree = (trimmed != 0) & (trimmed.sign() == trimmed.sum(0).sign())
    mean = torch.where(agree, trimmed, 0.0).sum(0) / agree.sum(0).clamp(min=1)
    return mean.view(differences.shape[1:])
