"""Baselines of POTARA that mix a federated and a local adapter with one weight: a fixed one, or the best of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from llm_fed.merge.grid import best
from llm_fed.mergers.parents import Space, curve, doubled, mixed, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import AtLeast, AtMost, PositiveInt
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class Mean(Method):
    """The weighted mean of the FedIT adapter and the local one, with one weight for all clients (POTARA paper, Figure
    3)."""

    paper: ClassVar[str] = "Weighted mean of a federated and a local adapter (Wortsman et al. 2022)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True
    data_free: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    # lambda_fed
    weight: Annotated[float, AtLeast(0), AtMost(1), "0 for the local adapter, 1 for the federated one"] = 0.5
    space: Space = "factors"

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure) if self.space == "delta" else structure

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        client.memory["merged"] = mixed(fed, local, self.weight, self.space)
        client.memory["recipe"] = {"lambda_fed": self.weight}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]


@dataclass(frozen=True)
class Grid(Method):
    """Like `mean`, with the weight out of 0, 0.1, ..., 1 that scores best on the client's validation examples, or 0.5
    without any.

    The POTARA paper compares its closed form with it (App. E). It costs eleven evaluations per client.
    """

    paper: ClassVar[str] = "Grid search over mixing weights (Zou et al. 2026, App. E)"
    without_held_out: ClassVar[str] = "their two adapters weigh the same"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    space: Space = "factors"

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure) if self.space == "delta" else structure

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        scores = await curve(client, fed, local, self.space)
        chosen = best({float(weight): score for weight, score in scores.items()}) if scores else 0.5
        client.memory["merged"] = mixed(fed, local, chosen, self.space)
        client.memory["recipe"] = {"lambda_fed": chosen} | ({"grid": scores} if scores else {})

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]
