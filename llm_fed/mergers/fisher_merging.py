"""Merging Models with Fisher-Weighted Averaging (Matena and Raffel, NeurIPS 2022), for a federated and a local
adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from llm_fed.basics.figures import rounded
from llm_fed.merge.fisher import fisher_merge
from llm_fed.merge.mean import mean
from llm_fed.mergers.parents import WITHOUT_HELD_OUT, examples_of, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.heads import refuse_without_head
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.settings import NonNegativeFloat, PositiveInt
from llm_fed.state.entries import HEAD, factor_of
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class FisherMerging(Method):
    """Every parameter is the mean of the two adapters, weighted by their Fisher information.

    An image model's head is merged like the rest, or with `head: mean` it is the plain mean of the two.

    Deviation: on the entries of LoRA adapters, where the POTARA paper (App. H) takes all parameters of a ViT.
    Deviation: `damping` where Matena and Raffel raise small values of F to a floor of 1e-6, which knows no scale.
    """

    paper: ClassVar[str] = "Fisher merging (Matena and Raffel 2022)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    samples: PositiveInt = 30  # examples behind the Fisher information
    damping: NonNegativeFloat = 1e-3  # added to F, relative to the mean of F over both adapters
    fisher: Literal["empirical", "sampled"] = "empirical"  # labels of the data, or drawn from the model
    fisher_data: Literal["train", "held-out"] = "train"  # held-out: the validation examples
    head: Literal["fisher", "mean"] = "fisher"  # of image models: how it is merged

    @property
    def without_held_out(self) -> str:  # type: ignore[override]
        return WITHOUT_HELD_OUT if self.fisher_data == "held-out" else ""

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def init(self, server: Server) -> Message:
        refuse_without_head(self, server, "head")
        return super().init(server)

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        examples, said = examples_of(client, self.samples, self.fisher_data)
        found = await client.gradient_moments(fed, local, examples, sampled=self.fisher == "sampled")
        merged = fisher_merge([fed, local], found.fisher, self.damping)
        head = [name for name in fed if factor_of(name) == HEAD]
        if head and self.head == "mean":
            merged = merged.updated(mean([fed.pick(head), local.pick(head)]))
        client.memory["merged"] = merged
        information = found.fisher.sum(1)
        share = float(information[0] / information.sum()) if information.any() else 0.5
        client.memory["recipe"] = {**rounded({"fed_share": share, "losses": found.losses}), **said}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]
