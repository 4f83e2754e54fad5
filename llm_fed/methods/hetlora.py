"""HetLoRA: Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models (Cho, Liu, Xu, Fahrezi, Joshi;
EMNLP 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch

from llm_fed.merge.factors import heads, product_norms, rank_of, rebuilt, resized
from llm_fed.merge.products import layers
from llm_fed.method import Client, Json, Message, Method, Server, Site, State, Upload
from llm_fed.method.optimizer import Tail
from llm_fed.methods import served
from llm_fed.settings import Above, AtMost, NonNegativeFloat
from llm_fed.state.roles import Index, Roles


@dataclass(frozen=True)
class HetLoRA(Method):
    """The server's adapter has the largest rank; each client trains as many of its first components as its own rank,
    and the server pads the results with zeros and averages the factors, with more weight on larger products.

    Rank self-pruning: a client's loss has the term `pruning * ||B[:, decay r:]|| ||A[decay r:]||`. If this norm is
    smaller after training than before, the client's rank becomes `decay r`, rounded down, from then on; its scaling
    does not change.
    An image model's head is averaged, weighted by numbers of examples.

    The authors published no code, and the full paper was not available: padding, truncation and weights follow its
    summaries, and the moment of pruning follows other reimplementations. lambda and gamma are those with which the
    authors of FlexLoRA compared it.

    Deviation: the paper has no scaling alpha / r. Here clients' factors are averaged in the server's
    (`merge.factors`), so that a product means the same at every client
    (`test_hetlora_pads_with_zeros_and_averages_factors`).
    Deviation: weights are taken layer by layer, each from the layer's own products, of which the paper has one
    (`test_hetlora_weighs_by_the_norms_of_products`).
    Deviation: in the round in which a client prunes itself, what it gave up travels once more, as zeros, since the
    server expects what it requested (`test_a_client_whose_tail_shrinks_prunes_itself_for_good`).
    """

    paper: ClassVar[str] = "HetLoRA (Cho et al. 2024)"
    adapters_only: ClassVar[bool] = True
    any_rank: ClassVar[bool] = True
    sends: ClassVar[Roles] = {"rank": Index(least=1)}

    weights: Literal["sparsity", "examples"] = "sparsity"  # ||B_k A_k|| over their sum, or n_k / n
    pruning: NonNegativeFloat = 0.001  # lambda; 0: ranks stay
    decay: Annotated[float, Above(0), AtMost(1)] = 0.99  # gamma: the share of its rank that is kept

    def init(self, server: Server) -> Message:
        return {"model": server.initial(), "clients": served.clients_of(server)}

    def broadcast(self, state: Message, client: str) -> Message:
        return served.part(state["model"], state["clients"], client)

    async def client_update(self, client: Client, message: Message) -> Message:
        rank, optimizer = rank_of(message), client.optimizer
        kept = max(1, math.floor(self.decay * rank + 1e-9)) if self.pruning else rank
        if kept < rank:
            optimizer = replace(optimizer, tail=Tail(self.pruning, kept))
        theta = await client.fit(message, structure=client.structure.of_rank(rank), optimizer=optimizer)
        if kept < rank and _tail(theta, kept) < _tail(message, kept):
            return {"adapter": resized(resized(theta, kept), rank), "rank": kept}
        return {"adapter": theta, "rank": rank}

    def upload_like(self, message: Message) -> Message:
        return {"adapter": message, "rank": rank_of(message)}

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        model, clients = state["model"], dict(state["clients"])
        padded = []
        for upload in uploads:
            rank, factor = served.of(clients, upload.client, model)
            padded.append(resized(upload.content["adapter"], rank_of(model), 1 / factor))
            pruned = max(1, min(rank, upload.content["rank"]))
            if pruned < rank:
                clients[upload.client] = {"rank": pruned, "factor": factor}
        examples = [float(upload.num_examples) for upload in uploads]
        return {"model": self._mean(padded, examples), "clients": dict(sorted(clients.items()))}

    async def personalize(self, client: Site, message: Message) -> Message:
        return resized(message, client.structure.rank)

    def report(self, state: Message) -> dict[str, Json]:
        return {"ranks": {name: own["rank"] for name, own in state["clients"].items()}} if state["clients"] else {}

    def _mean(self, padded: list[State], examples: list[float]) -> State:
        entries = heads(padded, examples)
        norms = [product_norms(state) for state in padded]
        for layer, a, b in layers(padded[0]):
            weights = examples if self.weights == "examples" else [of_layer[layer] for of_layer in norms]
            # Where no client adds anything to the layer, all count alike.
            share = torch.tensor(weights if sum(weights) else [1.0] * len(padded), dtype=torch.float64)
            for name in (a, b):
                stacked = torch.stack([state[name] for state in padded])
                entries[name] = torch.einsum("k,k...->...", (share / share.sum()).to(stacked), stacked)
        return rebuilt(padded[0], entries)


def _tail(state: State, first: int) -> float:
    """`sum over layers of ||B[:, first:]|| ||A[first:]||`."""
    return sum(float(state[b][:, first:].norm() * state[a][first:].norm()) for _, a, b in layers(state))
