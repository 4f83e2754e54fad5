"""What a client that joins after the last round does: it weighs the pool's adapters by its own examples.

Shape letter: d adapters of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llm_fed import methods
from llm_fed.basics.errors import ClientError
from llm_fed.basics.names import rounded
from llm_fed.experiment.merging import join
from llm_fed.experiment.pool import Personal, Pool, Way
from llm_fed.method.client import Client
from llm_fed.method.merge import Merge
from llm_fed.settings.config import Config
from llm_fed.state import State, combine

# Nats per target token by which the losses of two adapters differ where their weights differ e-fold. Without a limit
# all weigh the same, at 0 the best alone has all.
TEMPERATURES = (math.inf, 1.0, 0.3, 0.1, 0.03, 0.0)
AT_ONCE = 32  # adapters whose losses are found together


@dataclass(frozen=True)
class Weighed:
    """How the adapters of a pool are merged for one client.

    Attributes:
        weights: (d,), float64, at least 0, with the sum 1.
        loss: of the merge, in nats per target token of the client's examples.
        equal: the same with equal weights.
    """

    weights: Tensor
    loss: float
    equal: float


async def weigh(site: Client, pool: Sequence[State], examples: Sequence[Any]) -> Weighed:
    """Weights by which the merge of the pool has a low loss on the examples, found by forward passes alone.

    The weights are a softmax of the negative losses that the adapters have alone. Of all TEMPERATURES the one is taken
    whose merge has the lowest loss, and of equal losses the highest. So the merge is never worse on these examples than
    one with equal weights, or than the best adapter alone.

    Raises:
        ClientError: a loss is not finite.
    """
    alone = await _losses(site, pool, examples)
    if len(pool) == 1:
        return Weighed(torch.ones(1, dtype=torch.float64), float(alone), float(alone))
    candidates = [softmax(alone, temperature) for temperature in TEMPERATURES]
    losses = await _losses(site, [combine(pool, weights) for weights in candidates], examples)
    chosen = int(losses.argmin())
    return Weighed(candidates[chosen], float(losses[chosen]), float(losses[0]))


def softmax(losses: Tensor, temperature: float) -> Tensor:
    """The weights (d,) of adapters with these losses (d,); of equally good ones at temperature 0 the first has all."""
    if temperature == 0:
        return torch.nn.functional.one_hot(losses.argmin(), len(losses)).double()
    return (-losses / temperature).softmax(0)


async def _losses(site: Client, states: Sequence[State], examples: Sequence[Any]) -> Tensor:
    """(len(states),), float64, of each state alone."""
    per_state: list[float] = []
    for first in range(0, len(states), AT_ONCE):
        per_state += await site.losses_of(states[first : first + AT_ONCE], examples)
    losses = torch.tensor(per_state, dtype=torch.float64)
    if not losses.isfinite().all():
        raise ClientError(f"client {site.id}: one of the run's adapters has a loss on its examples that is not finite")
    return losses


async def merged_from_pool(site: Client, pool: Pool, count: int, steps: int | None) -> Personal:
    """The merge of a pool with the weights that `weigh` finds on at most `count` examples, trained so many steps."""
    names, states, chosen = list(pool.members), list(pool.members.values()), site.sample(count)
    weighed = await weigh(site, states, chosen)
    recipe = {
        "weights": dict(zip(names, rounded(weighed.weights.tolist()), strict=True)),
        "examples": len(chosen),
        "loss": rounded(weighed.loss),
        "loss_of_equal_weights": rounded(weighed.equal),
    }
    state = combine(states, weighed.weights)
    if steps is None:
        return state, pool.structure, recipe
    return await site.fit(state, steps=steps), pool.structure, recipe | {"steps": steps}


def way(config: Config, pool: Pool, count: int, steps: int | None) -> Way:
    """How a client joins the run of this configuration, see `merged_from_pool` and `merging.join`."""
    method = methods.build(config.method)
    if isinstance(method, Merge):
        return join(config, method, pool, steps)
    return Way(partial(merged_from_pool, pool=pool, count=count, steps=steps))
