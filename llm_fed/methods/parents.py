"""What the methods share that merge two parents, FedIT's adapter and the local one. No method itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from llm_fed.errors import UserError
from llm_fed.eval.clients import score_split
from llm_fed.merge.grid import WEIGHTS
from llm_fed.merge.mean import mix_factors, mix_products
from llm_fed.method import Needed
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.site import Site
from llm_fed.state import State

# factors: A and B are mixed; delta: B A is, as one adapter of twice the rank
Space = Literal["factors", "delta"]


def parent(name: str, fed_round: int | None, local_round: int | None, private_head: bool) -> Needed:
    """The run of FedIT, or of local training, as the hyper-parameters of these names say."""
    if name == "fedit":
        return Needed(fed_round, {"private_head": True} if private_head else {})
    return Needed(local_round)


def mixed(fed: State, local: State, weight: float | Mapping[str, float], space: Space) -> State:
    """`weight * fed + (1 - weight) * local` in the space asked for; a weight per factor in `factors` alone."""
    if space == "delta":
        assert not isinstance(weight, Mapping)  # refused with the settings
        return mix_products(fed, local, weight)
    return mix_factors(fed, local, weight)


def doubled(structure: Structure) -> Lora:
    """The structure of `mix_products`: twice the rank with the same scaling."""
    if not isinstance(structure, Lora):
        raise UserError("method.space=delta is for adapters; use method.space=factors for whole models")
    return replace(structure, rank=2 * structure.rank, alpha=2 * structure.alpha)


async def curve(client: Site, fed: State, local: State, space: Space) -> dict[str, float]:
    """Validation scores (0-100) by lambda_fed."""
    if not client.data.queries.get("validation"):
        raise UserError(f"client {client.id} has no validation example to choose a weight by; set task.validation")
    return {str(w): rounded(await score_split(client, mixed(fed, local, w, space), "validation")) for w in WEIGHTS}


def rounded(value: Any) -> Any:
    """Six digits of every float for a recipe; one that JSON does not have is None."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [rounded(item) for item in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
