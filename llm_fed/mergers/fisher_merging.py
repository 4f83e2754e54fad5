"""Merging Models with Fisher-Weighted Averaging (Matena and Raffel, NeurIPS 2022), for a federated and a local
adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from llm_fed.basics.names import rounded
from llm_fed.merge.mean import mean
from llm_fed.mergers.mixing import by_training_examples, examples_of
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.settings import NonNegativeFloat, PositiveInt
from llm_fed.state import HEAD, State, factor_of, stack


@Merger(paper="Fisher merging (Matena and Raffel 2022)", without_held_out=by_training_examples, of_head=("head",))
async def fisher_merging(
    client: Client,
    fed: State,
    local: State,
    *,
    samples: PositiveInt = 30,  # examples behind the Fisher information
    damping: NonNegativeFloat = 1e-3,  # added to F, relative to the mean of F over both adapters
    fisher: Literal["empirical", "sampled"] = "empirical",  # labels of the data, or drawn from the model
    fisher_data: Literal["train", "held-out"] = "train",  # held-out: the validation examples
    head: Literal["fisher", "mean"] = "fisher",  # of image models: how it is merged
) -> Merged:
    """Every parameter is the mean of the two adapters, weighted by their Fisher information.

    An image model's head is merged like the rest, or with `head: mean` it is the plain mean of the two.

    Deviation: on the entries of LoRA adapters, where the POTARA paper (App. H) takes all parameters of a ViT.
    Deviation: `damping` where Matena and Raffel raise small values of F to a floor of 1e-6, which knows no scale.
    """
    examples, said = examples_of(client, samples, fisher_data)
    evidence = await client.gradient_moments(fed, local, examples, sampled=fisher == "sampled")
    merged = fisher_merge([fed, local], evidence.fisher, damping)
    of_head = [name for name in fed if factor_of(name) == HEAD]
    if of_head and head == "mean":
        merged = merged.updated(mean([fed.pick(of_head), local.pick(of_head)]))
    information = evidence.fisher.sum(1)
    share = float(information[0] / information.sum()) if information.any() else 0.5
    return merged, {**rounded({"fed_share": share, "losses": evidence.losses}), **said}


def fisher_merge(states: Sequence[State], fisher: Tensor, damping: float) -> State:
    """`sum_i F_i theta_i / sum_i F_i`, coordinate by coordinate.

    Args:
        states: K states of P parameters.
        fisher: (K, P), their diagonal Fisher information.
        damping: `damping * mean(F)`, over all models and coordinates, is added to every F: where no gradient says
            anything the merge is the plain mean.
    """
    weights = fisher.double() + damping * fisher.double().mean()
    total = weights.sum(0)
    share = torch.where(total > 0, weights / total, 1 / len(states))
    row = (share * stack(states).double().to(share.device)).sum(0)
    return states[0].like(row.to(states[0].row))
