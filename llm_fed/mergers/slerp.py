"""SLERP: Animating Rotation with Quaternion Curves (Shoemake, SIGGRAPH 1985), spherical linear interpolation, for a
federated and a local adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from llm_fed.merge.products import combined
from llm_fed.mergers.parents import doubled, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import AtLeast, AtMost, PositiveInt
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class Slerp(Method):
    """Spherical interpolation between the two adapters' layer updates, which keeps their length even where they point
    in different directions; exactly, as one adapter of twice the rank."""

    paper: ClassVar[str] = "SLERP (Shoemake 1985)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True
    data_free: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    # lambda_fed
    weight: Annotated[float, AtLeast(0), AtMost(1), "0 for the local adapter, 1 for the federated one"] = 0.5

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure)

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        client.memory["merged"] = combined(fed, local, lambda one, other: arc(one, other, self.weight))
        client.memory["recipe"] = {"lambda_fed": self.weight}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]


def arc(one: Tensor, other: Tensor, weight: float) -> tuple[float, float]:
    """The coefficients of both; those of a straight line where an angle is none, or half a turn."""
    lengths = torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other)
    cosine = float((one * other).sum() / lengths) if lengths > 0 else 1.0
    angle = torch.tensor(max(-1.0, min(1.0, cosine)), dtype=torch.float64).acos()
    sine = float(angle.sin())
    if sine < 1e-6:
        return weight, 1 - weight
    return float((weight * angle).sin()) / sine, float(((1 - weight) * angle).sin()) / sine
