"""Baselines of POTARA that mix a federated and a local adapter with one weight: a fixed one, or the best of a grid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from llm_fed.errors import UserError
from llm_fed.eval.clients import score_split
from llm_fed.merge.grid import WEIGHTS, best
from llm_fed.merge.mean import mix_factors, mix_products
from llm_fed.messages.wire import Message
from llm_fed.method import Method
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.settings import AtLeast, AtMost, PositiveInt
from llm_fed.site import Site
from llm_fed.state import State

# factors: A and B are mixed; delta: B A is, as one adapter of twice the rank
Space = Literal["factors", "delta"]


@dataclass(frozen=True)
class OfTwo(Method):
    """What the methods have in common that merge FedIT's adapter and the local one."""

    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves

    def needed_round(self, name: str) -> int | None:
        return {"fedit": self.fed_round, "local": self.local_round}[name]

    def needed_settings(self, name: str) -> dict[str, Any]:
        return {"private_head": True} if self.private_head and name == "fedit" else {}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]


@dataclass(frozen=True)
class Mean(OfTwo):
    """The FedIT adapter and the local adapter with one weight for all clients (POTARA paper, Figure 3)."""

    paper: ClassVar[str] = "Weighted mean of a federated and a local adapter (Wortsman et al. 2022)"

    # lambda_fed
    weight: Annotated[float, AtLeast(0), AtMost(1), "0 for the local adapter, 1 for the federated one"] = 0.5
    space: Space = "factors"

    def wrap(self, structure: Structure, client: Site | None) -> Structure:
        return doubled(structure) if self.space == "delta" else structure

    async def finish(self, client: Site, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        client.memory["merged"] = mixed(fed, local, self.weight, self.space)
        client.memory["recipe"] = {"lambda_fed": self.weight}


@dataclass(frozen=True)
class Grid(OfTwo):
    """Like `mean`, with the weight of 0, 0.1, ..., 1 that scores best on the client's validation examples.

    What POTARA's closed form is compared with (App. E); it costs eleven evaluations per client.
    """

    paper: ClassVar[str] = "Grid search over mixing weights (Zou et al. 2026, App. E)"

    space: Space = "factors"

    def wrap(self, structure: Structure, client: Site | None) -> Structure:
        return doubled(structure) if self.space == "delta" else structure

    async def finish(self, client: Site, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        scores = await curve(client, fed, local, self.space)
        chosen = best({float(weight): score for weight, score in scores.items()})
        client.memory["merged"] = mixed(fed, local, chosen, self.space)
        client.memory["recipe"] = {"lambda_fed": chosen, "grid": scores}


def mixed(fed: State, local: State, weight: float | Mapping[str, float], space: str) -> State:
    """`weight * fed + (1 - weight) * local` in the space asked for; a weight per factor in `factors` alone."""
    if space == "delta":
        assert not isinstance(weight, Mapping)  # refused with the settings
        return mix_products(fed, local, weight)
    return mix_factors(fed, local, weight)


def doubled(structure: Structure) -> Lora:
    """The structure of `mix_products`: twice the rank with the same scaling."""
    if not isinstance(structure, Lora):
        raise UserError("method.space=delta is for adapters; use method.space=factors for whole models")
    return replace(structure, rank=2 * structure.rank, alpha=2 * structure.alpha)


async def curve(client: Site, fed: State, local: State, space: str) -> dict[str, float]:
    """Validation scores (0-100) by lambda_fed."""
    if not client.queries.get("validation"):
        raise UserError(f"client {client.id} has no validation example to choose a weight by; set task.validation")
    return {str(w): rounded(await score_split(client, mixed(fed, local, w, space), "validation")) for w in WEIGHTS}


def rounded(value: Any) -> Any:
    """Six digits of every float for a recipe; one that JSON does not have is None."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [rounded(item) for item in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
