"""What a client that joins after the last round does: it weighs the pool's adapters by its own examples, or merges the
pool's one with its own.

Shape letter: d adapters of a pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llm_fed.basics.errors import ClientError
from llm_fed.basics.names import rounded
from llm_fed.experiment.pool import Pool
from llm_fed.method.client import Client
from llm_fed.method.merge import Merge
from llm_fed.models.structure import Structure
from llm_fed.state import State, combine

# Nats per target token by which the losses of two adapters differ where their weights differ e-fold. Without a limit
# all weigh the same, at 0 the best alone has all.
TEMPERATURES = (math.inf, 1.0, 0.3, 0.1, 0.03, 0.0)
AT_ONCE = 32  # adapters whose losses are found together

Personal = tuple[State, Structure, dict[str, Any]]  # an adapter, its structure, and how it was made


async def merged_from_pool(site: Client, pool: Pool, count: int, steps: int | None) -> Personal:
    """The merge of a pool with weights by which it has a low loss on at most `count` examples, found by forward passes
    alone, and then trained so many steps.

    The weights are a softmax of the negative losses that the adapters have alone. Of all TEMPERATURES the one is taken
    whose merge has the lowest loss, and of equal losses the highest. So the merge is never worse on these examples than
    one with equal weights, or than the best adapter alone. ClientError: a loss is not finite.
    """
    states, chosen = list(pool.members.values()), site.sample(count)
    alone = await _losses(site, states, chosen)
    candidates = [softmax(alone, temperature) for temperature in TEMPERATURES]
    merges = [combine(states, weights) for weights in candidates]
    losses = await _losses(site, merges, chosen) if len(states) > 1 else alone
    best = int(losses.argmin())
    recipe = {
        "weights": dict(zip(pool.members, rounded(candidates[best].tolist()), strict=True)),
        "examples": len(chosen),
        "loss": rounded(float(losses[best])),
        "loss_of_equal_weights": rounded(float(losses[0])),
    }
    if steps is None:
        return merges[best], pool.structure, recipe
    return await site.fit(merges[best], steps=steps), pool.structure, recipe | {"steps": steps}


async def merged_with_own(site: Client, method: Merge, pool: Pool, steps: int | None) -> Personal:
    """The merge of the pool's one adapter, which is federated, with one that the client trains in so many steps (None:
    the federated one)."""
    ((name, federated),) = pool.members.items()
    if steps is None:
        return federated, pool.structure, {"weights": {name: 1.0}}
    local = await site.fit(site.initial(), steps=steps)
    structure = method.wrap(site.structure, site)
    own, parents = replace(site, structure=structure), (parent.name for parent in method.parents)
    await method.finish(own, dict(zip(parents, (federated, local), strict=True)))
    return await method.personalize(own, None), structure, {"steps": steps, **method.recipe(own)}


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
