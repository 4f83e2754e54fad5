"""DARE: Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch (Yu, Yu, Yu, Huang,
Li; ICML 2024), for a federated and a local adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from llm_fed.basics.names import rounded
from llm_fed.basics.rng import generator
from llm_fed.merge.products import factored, weighed
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.settings import AtLeast, Below, PositiveFloat
from llm_fed.state import State


@Merger(paper="DARE (Yu et al. 2024)", data_free=True, doubles=True)
def dare(
    client: Client,
    fed: State,
    local: State,
    *,
    drop: Annotated[float, AtLeast(0), Below(1)] = 0.5,  # p; the paper goes up to 0.99
    scaling: PositiveFloat = 0.5,  # of the sum; 0.5 is the mean of the two
) -> Merged:
    """Entries of the two adapters' layer updates are dropped at random and the rest rescaled to compensate; the sum of
    both is added, times `scaling` (with task arithmetic, as in the paper).

    Deviation: the result has no low rank, so the nearest adapter of twice the rank is exported; `lost` in the recipe
    says how much is cut off (`test_what_a_product_loses`).
    """

    def rule(layer: str, products: Tensor) -> Tensor:
        return scaling * dropped(products, drop, client.seed, client.id, layer)

    merged, lost = factored([fed, local], rule)
    return merged, rounded({"drop": drop, "scaling": scaling, "lost": lost})


def dare_of(
    states: Sequence[State], weights: Sequence[float], *, drop: float = 0.5, rank: int | None = None
) -> tuple[State, float]:
    """DARE of weighted adapters, and how much a lower rank loses; each call drops the same entries."""
    return factored(states, lambda layer, products: dropped(weighed(products, weights), drop, 0, layer), rank)


def dropped(products: Tensor, drop: float, seed: int, *where: str) -> Tensor:
    """The sum (out, in) of what is left of K products (K, out, in) whose entries are dropped with this probability,
    rescaled; `seed` and `where` decide which."""
    kept = torch.rand(products.shape, generator=generator(seed, "drop", *where)).to(products.device) >= drop
    return (kept * products).sum(0) / (1 - drop)
