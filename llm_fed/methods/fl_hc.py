"""FL+HC: Federated learning with hierarchical clustering of local updates to improve training on non-IID data (Briggs,
Fan, Andras; IJCNN 2020, arXiv 2004.11791), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from llm_fed.merge.linkage import Linkage, agglomerated, cosines
from llm_fed.method import Json, Message, Method, Server, State, Upload, averaged
from llm_fed.settings import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class FLHC(Method):
    """FedAvg for some rounds; then the clients are clustered once by their updates, and FedAvg goes on in each cluster.

    Clusters are merged while they are nearer than `threshold`, so the server need not know how many there are.
    Deviation: the paper asks all clients in the round of the clustering. Here each client counts with its last update,
    and the clustering waits until every client has sent one.
    """

    paper: ClassVar[str] = "FL+HC (Briggs et al. 2020)"
    robust: ClassVar[bool] = True

    rounds_before: PositiveInt = 5  # n, rounds of FedAvg before the clustering
    distance: Literal["cosine", "euclidean", "manhattan"] = "cosine"  # of two updates; cosine is 1 minus their cosine
    linkage: Linkage = "average"
    threshold: PositiveFloat = 0.9  # clusters that are further apart stay apart; the paper tunes it for each data set

    def init(self, server: Server) -> Message:
        return {"groups": [sorted(server.clients)], "models": [server.initial()], "round": 0, "last": {}}

    def broadcast(self, state: Message, client: str) -> Message:
        of_groups = zip(state["groups"], state["models"], strict=True)
        return next((model for group, model in of_groups if client in group), state["models"][0])

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        groups, models, last = state["groups"], state["models"], state["last"]
        if last is not None:
            last = {**last, **{upload.client: upload.content.row for upload in uploads}}
            if state["round"] + 1 >= self.rounds_before and len(last) == len(groups[0]):
                rows = torch.stack([last[client] for client in groups[0]])
                clusters = agglomerated(self.distances(rows), self.linkage, most=self.threshold)
                groups = [[groups[0][index] for index in cluster] for cluster in clusters]
                models, last = models * len(groups), None  # each begins with the common model
        models = [
            averaged(server, model, [upload for upload in uploads if upload.client in group])
            for group, model in zip(groups, models, strict=True)
        ]
        return {"groups": groups, "models": models, "round": state["round"] + 1, "last": last}

    def distances(self, rows: Tensor) -> Tensor:
        """(m, m), of updates (m, P)."""
        if self.distance == "cosine":
            return 1 - cosines(rows)
        return torch.cdist(rows.double(), rows.double(), p=1.0 if self.distance == "manhattan" else 2.0)

    def pool(self, state: Message) -> list[State]:
        return list(state["models"])

    def report(self, state: Message) -> dict[str, Json]:
        return {"groups": state["groups"], "clustered": state["last"] is None}
