"""What the methods share that merge two parents, FedIT's adapter and the local one. No method itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from llm_fed.basics.errors import UserError
from llm_fed.basics.figures import rounded
from llm_fed.merge.grid import WEIGHTS
from llm_fed.merge.mean import mix_factors, mix_products
from llm_fed.method import Needed
from llm_fed.method.client import Client
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.scoring.evaluation import score_split
from llm_fed.state import State
from llm_fed.state.entries import HEAD, factor_of

# factors: A and B are mixed; delta: B A is, as one adapter of twice the rank
Space = Literal["factors", "delta"]
WITHOUT_HELD_OUT = "their training examples give the Fisher information"


def parent(name: str, fed_round: int | None, local_round: int | None, private_head: bool) -> Needed:
    """The run of FedIT, or of local training, as the hyper-parameters of these names say."""
    if name == "fedit":
        return Needed(fed_round, {"private_head": True} if private_head else {})
    return Needed(local_round)


def examples_of(client: Client, count: int, source: Literal["train", "held-out"]) -> tuple[list[Any], dict[str, Any]]:
    """Up to `count` examples, training ones where a client has no held-out one; and what they are, for the recipe."""
    held_out = source == "held-out" and bool(client.data.held_out)
    examples = client.sample(count, held_out=held_out)
    own = {} if held_out == (source == "held-out") else {"fisher_data": "train"}
    return examples, {"samples": len(examples), **own}


def mixed(
    fed: State, local: State, weight: float | Mapping[str, float], space: Space, *, own_head: bool = False
) -> State:
    """`weight * fed + (1 - weight) * local` in the space asked for; a weight per factor in `factors` alone.

    Args:
        own_head: an image model's head is that of `local`.
    """
    if space == "delta":
        assert not isinstance(weight, Mapping)  # refused with the settings
        merged = mix_products(fed, local, weight)
    else:
        merged = mix_factors(fed, local, {HEAD: 0.0, **weight} if isinstance(weight, Mapping) else weight)
    head = [name for name in local if factor_of(name) == HEAD]
    return merged.updated(local.pick(head)) if own_head and head else merged


def doubled(structure: Structure) -> Lora:
    """The structure of `mix_products`: twice the rank with the same scaling."""
    if not isinstance(structure, Lora):
        raise UserError("method.space=delta is for adapters; use method.space=factors for whole models")
    return replace(structure, rank=2 * structure.rank, alpha=2 * structure.alpha)


async def curve(client: Client, fed: State, local: State, space: Space, *, own_head: bool = False) -> dict[str, float]:
    """Validation scores (0-100) by lambda_fed; empty for a client without validation examples."""
    if not client.data.queries.get("validation"):
        return {}
    models = {weight: mixed(fed, local, weight, space, own_head=own_head) for weight in WEIGHTS}
    return {str(weight): rounded(await score_split(client, model, "validation")) for weight, model in models.items()}
