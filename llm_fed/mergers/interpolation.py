"""Baselines of POTARA that mix a federated and a local adapter with one weight: a fixed one, or the best of a grid."""

from __future__ import annotations

from llm_fed.merge.mean import best
from llm_fed.mergers.mixing import FedShare, Space, curve, in_delta, mixed
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.state import State


@Merger(
    paper="Weighted mean of a federated and a local adapter (Wortsman et al. 2022)", data_free=True, doubles=in_delta
)
def mean(
    client: Client,
    fed: State,
    local: State,
    *,
    weight: FedShare = 0.5,  # lambda_fed
    space: Space = "factors",
) -> Merged:
    """The weighted mean of FedIT's adapter and the local one, one weight for all (POTARA paper, Figure 3)."""
    return mixed(fed, local, weight, space), {"lambda_fed": weight}


@Merger(
    paper="Grid search over mixing weights (Zou et al. 2026, App. E)", doubles=in_delta,
    without_held_out="their two adapters weigh the same",
)  # fmt: skip
async def grid(client: Client, fed: State, local: State, *, space: Space = "factors") -> Merged:
    """Like `mean`, with the weight out of 0, 0.1, ..., 1 that scores best on the client's validation examples, or 0.5
    without any.

    The POTARA paper compares its closed form with it (App. E). It costs eleven evaluations per client.
    """
    scores = await curve(client, fed, local, space)
    chosen = best({float(weight): score for weight, score in scores.items()}) if scores else 0.5
    return mixed(fed, local, chosen, space), {"lambda_fed": chosen} | ({"grid": scores} if scores else {})
