"""What mergers share that weigh the federated and the local adapter: by which examples, in which space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from llm_fed.basics.documents import Json
from llm_fed.basics.names import rounded
from llm_fed.merge.mean import WEIGHTS, mix_factors, mix_products
from llm_fed.method.client import Client
from llm_fed.scoring.evaluation import score_split
from llm_fed.settings import AtLeast, AtMost
from llm_fed.state import HEAD, State, factor_of

# factors: A and B are mixed; delta: B A is, as one adapter of twice the rank
Space = Literal["factors", "delta"]
FedShare = Annotated[float, AtLeast(0), AtMost(1), "0 for the local adapter, 1 for the federated one"]


def in_delta(settings: Any) -> bool:
    """Whether products are mixed, which doubles the rank."""
    return settings.space == "delta"  # type: ignore[no-any-return]


def by_training_examples(settings: Any) -> str:
    """What gives the Fisher information of a client without held-out examples, where these are requested."""
    return "their training examples give the Fisher information" if settings.fisher_data == "held-out" else ""


def examples_of(client: Client, count: int, source: Literal["train", "held-out"]) -> tuple[list[Any], dict[str, Json]]:
    """Up to `count` examples, training ones where a client has no held-out one; and what they are, for the recipe."""
    held_out = source == "held-out" and bool(client.data.held_out)
    examples = client.sample(count, held_out=held_out)
    own = {} if held_out == (source == "held-out") else {"fisher_data": "train"}
    return examples, {"samples": len(examples), **own}


def mixed(
    fed: State, local: State, weight: float | Mapping[str, float], space: Space, *, own_head: bool = False
) -> State:
    """`weight * fed + (1 - weight) * local` in the space requested; a weight per factor in `factors` alone. `own_head`:
    an image model's head is that of `local`."""
    if space == "delta":
        assert not isinstance(weight, Mapping)  # refused with the settings
        merged = mix_products(fed, local, weight)
    else:
        merged = mix_factors(fed, local, {HEAD: 0.0, **weight} if isinstance(weight, Mapping) else weight)
    head = [name for name in local if factor_of(name) == HEAD]
    return merged.updated(local.pick(head)) if own_head and head else merged


async def curve(client: Client, fed: State, local: State, space: Space, *, own_head: bool = False) -> dict[str, float]:
    """Validation scores (0-100) by lambda_fed; empty for a client without validation
    examples, or with such for which the metric is not defined."""
    if not client.data.queries.get("validation"):
        return {}
    models = {weight: mixed(fed, local, weight, space, own_head=own_head) for weight in WEIGHTS}
    scores = {str(weight): await score_split(client, model, "validation") for weight, model in models.items()}
    return {} if any(map(math.isnan, scores.values())) else {key: rounded(score) for key, score in scores.items()}
