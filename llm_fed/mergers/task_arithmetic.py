"""Editing Models with Task Arithmetic (Ilharco, Ribeiro, Wortsman, Gururangan, Schmidt, Hajishirzi, Farhadi; ICLR
2023), for a federated and a local adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from llm_fed.merge.products import combined
from llm_fed.mergers.parents import doubled, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import PositiveFloat, PositiveInt
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class TaskArithmetic(Method):
    """The sum of the two adapters' layer updates s B A, times `scaling`; exactly, as one adapter of twice the rank."""

    paper: ClassVar[str] = "Task arithmetic (Ilharco et al. 2023)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True
    data_free: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    scaling: PositiveFloat = 0.5  # lambda; 0.5 is the mean of the two. The paper chooses it on validation examples

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure)

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        client.memory["merged"] = combined(fed, local, lambda one, other: (self.scaling, self.scaling))
        client.memory["recipe"] = {"scaling": self.scaling}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]
