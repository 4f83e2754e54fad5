"""CFL: Clustered Federated Learning, Model-Agnostic Distributed Multi-Task Optimization under Privacy Constraints
(Sattler, Müller, Samek; IEEE TNNLS 2020, arXiv 1910.01991)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from llm_fed.merge.linkage import agglomerated, cosines
from llm_fed.method import Json, Message, Method, Server, State, Upload, averaged, mean_update
from llm_fed.settings import PositiveFloat
from llm_fed.state import stack


@dataclass(frozen=True)
class CFL(Method):
    """FedAvg, whose clients part in two whenever their common model hardly moves though single clients still pull.

    A group parts where the norm of its mean update is at most eps_1 and the largest norm of an update is at least eps_2
    (Eq. 29, 30): into the two halves whose most alike clients are the least alike (Eq. 27), which single linkage finds.
    Each half goes on from the common model by the mean of its own updates, and may part again.
    Deviation: eps_1 is relative, a share of the largest norm of a mean update so far, as the paper advises to choose it
    (Sec. IV); and a group parts only in a round in which all of its clients answer, as the paper always asks all.
    """

    paper: ClassVar[str] = "CFL (Sattler et al. 2020)"
    robust: ClassVar[bool] = True

    stationary: PositiveFloat = 0.1  # eps_1, as a share of the largest norm of a mean update so far
    incongruent: PositiveFloat = 4.0  # eps_2 in multiples of eps_1; the published settings are 0.4 and 1.6

    def init(self, server: Server) -> Message:
        return {"groups": [sorted(server.clients)], "models": [server.initial()], "largest": 0.0}

    def broadcast(self, state: Message, client: str) -> Message:
        of_groups = zip(state["groups"], state["models"], strict=True)
        return next((model for group, model in of_groups if client in group), state["models"][0])

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        groups: list[list[str]] = []
        models: list[State] = []
        largest = state["largest"]
        for group, model in zip(state["groups"], state["models"], strict=True):
            own = [upload for upload in uploads if upload.client in group]
            parts = [group]
            if own:
                rows = stack(upload.content for upload in own)
                norm = float(mean_update(server, own).row.norm())
                largest = max(largest, norm)
                if {upload.client for upload in own} == set(group) and self.parts(norm, largest, rows):
                    halves = agglomerated(-cosines(rows), "single", clusters=2)
                    parts = [sorted(own[index].client for index in half) for half in halves]
            for part in parts:
                groups.append(part)
                models.append(averaged(server, model, [upload for upload in own if upload.client in part]))
        return {"groups": groups, "models": models, "largest": largest}

    def parts(self, norm: float, largest: float, rows: Tensor) -> bool:
        """Whether clients with these updates (m, P), whose mean has this norm, do not belong together."""
        if len(rows) < 2:
            return False
        eps = self.stationary * largest
        return norm <= eps and float(rows.norm(dim=1).max()) >= self.incongruent * eps

    def pool(self, state: Message) -> list[State]:
        return list(state["models"])

    def report(self, state: Message) -> dict[str, Json]:
        return {"groups": state["groups"]}
