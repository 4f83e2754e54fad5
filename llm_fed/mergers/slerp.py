"""SLERP: Animating Rotation with Quaternion Curves (Shoemake, SIGGRAPH 1985), spherical linear interpolation, for a
federated and a local adapter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.merge.products import combined
from llm_fed.mergers.mixing import FedShare
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.state import State


@Merger(paper="SLERP (Shoemake 1985)", data_free=True, doubles=True)
def slerp(
    client: Client,
    fed: State,
    local: State,
    *,
    weight: FedShare = 0.5,  # lambda_fed
) -> Merged:
    """Spherical interpolation between the two adapters' layer updates, which keeps their length even where they point
    in different directions; exactly, as one adapter of twice the rank."""
    return combined([fed, local], lambda products: arc(products, weight)), {"lambda_fed": weight}


def slerp_of(states: Sequence[State], weights: Sequence[float]) -> tuple[State, float]:
    """SLERP of two adapters of which none is the federated one, exactly."""
    if len(states) != 2:
        raise UserError(
            f"slerp goes from one adapter to another, and {len(states)} are given; --method karcher takes any number"
        )
    return combined(states, lambda products: arc(products, weights[0] / sum(weights))), 0.0


def arc(products: Tensor, weight: float) -> tuple[float, float]:
    """Both coefficients, by the inner products (2, 2); those of a line where an angle is none, or half a turn."""
    lengths = float(products.diagonal().clamp(min=0).prod().sqrt())
    cosine = float(products[0, 1]) / lengths if lengths > 0 else 1.0
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    sine = math.sin(angle)
    if sine < 1e-6:
        return weight, 1 - weight
    return math.sin(weight * angle) / sine, math.sin((1 - weight) * angle) / sine
