"""POTARA: Communication-Efficient Personalized Adaptation via Federated-Local Model Merging (Zou, Shisher, Brinton,
Tripathi).

After FedIT and local training, each client merges its two adapters with the weights that minimise the trace of the
merged posterior's variance (Lemma 3.7), in closed form, from the gradients of a few of its own examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from llm_fed.basics.errors import UserError
from llm_fed.basics.figures import rounded
from llm_fed.merge.moments import Evidence
from llm_fed.merge.potara import sweep, traces
from llm_fed.mergers.parents import WITHOUT_HELD_OUT, Space, curve, doubled, examples_of, mixed, parent
from llm_fed.method import Method, Needed
from llm_fed.method.client import Client
from llm_fed.method.heads import refuse_without_head
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.settings import NonNegativeFloat, PositiveInt
from llm_fed.state import Layout
from llm_fed.state.entries import FACTORS, HEAD, factor_of
from llm_fed.state.wire import Message

OVERFITTED = 0.05  # nats per target: gradients below it say little about how sure a model is


@dataclass(frozen=True)
class Potara(Method):
    """One FedIT adapter and one local adapter, merged at each client with a weight in closed form.

    Deviation: the inverse Fisher information is damped (`merge.potara.variances`, `test_damping_bounds_the_trace`).
    Deviation: an image model's head, which App. B does not mention, is left out of the traces, as it would dominate
    them (docs/results/potara.md). `head` says how it is merged.
    Deviation: `fisher: empirical` takes the data's labels, where Eq. 19 takes the model's, so that one pass gives
    Eq. 19 and Eq. 54-57; `sampled` draws them, token by token given the data's prefix (docs/results/log/potara.md).
    """

    paper: ClassVar[str] = "POTARA (Zou et al. 2026)"
    needs: ClassVar[tuple[str, ...]] = ("fedit", "local")
    adapters_only: ClassVar[bool] = True

    fed_round: PositiveInt | None = None  # merge FedIT's adapter of this round; null: the one that its run selected
    local_round: PositiveInt | None = None  # likewise
    private_head: bool = False  # of image models: FedIT's clients keep their heads to themselves
    samples: PositiveInt = 30  # N of Eq. 19 and Table 11
    damping: NonNegativeFloat = 1e-3  # added to F, relative to the mean of F
    fisher: Literal["empirical", "sampled"] = "empirical"  # labels of the data, or drawn from the model
    fisher_data: Literal["train", "held-out"] = "train"  # train: App. B; held-out: the validation examples
    space: Space = "factors"  # factors: App. B; delta: Eq. 3
    per_factor: bool = False  # one weight for all A, one for all B, each from its own traces
    # An image model's. mixed: by the adapter's weight (`per_factor`: by the mean of the two); own: the local adapter's;
    # traced: it counts in the traces, and has a weight of its own under `per_factor`
    head: Literal["mixed", "own", "traced"] = "mixed"
    grid: bool = False  # also score the weights 0, 0.1, ..., 1 on the validation examples (App. E)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_factor and self.space == "delta":
            raise UserError(
                "method.per_factor=true mixes A and B separately, which method.space=delta cannot; choose one"
            )

    @property
    def without_held_out(self) -> str:  # type: ignore[override]
        return WITHOUT_HELD_OUT if self.fisher_data == "held-out" else ""

    def needed(self, name: str) -> Needed:
        return parent(name, self.fed_round, self.local_round, self.private_head)

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        return doubled(structure) if self.space == "delta" else structure

    def init(self, server: Server) -> Message:
        refuse_without_head(self, server, "head")
        return super().init(server)

    async def finish(self, client: Client, message: Message) -> None:
        fed, local = (client.given[name] for name in self.needs)
        examples, said = examples_of(client, self.samples, self.fisher_data)
        plain = client.structure
        if isinstance(plain, Lora) and self.space == "delta":
            plain = replace(plain, rank=plain.rank // 2, alpha=plain.alpha / 2)
        found = await client.gradient_moments(fed, local, examples, sampled=self.fisher == "sampled", structure=plain)
        counted = [name for name in fed if self.head == "traced" or factor_of(name) != HEAD]
        recipe = self._weigh(found, fed.layout, counted) | {**said, "losses": rounded(found.losses)}
        if (self.fisher, self.fisher_data) == ("empirical", "train") and found.losses[1] < OVERFITTED:
            recipe["note"] = (
                f"the local adapter's loss on the {len(examples)} examples is {found.losses[1]:.2g} nats per target: "
                "it has memorised them, so its gradients nearly vanish and POTARA treats it as very uncertain; try "
                "method.fisher_data=held-out"
            )
        weight = recipe["lambda_fed"]
        if self.per_factor and self.head == "mixed":
            weight = {**weight, HEAD: sum(weight[factor] for factor in FACTORS) / len(FACTORS)}
        client.memory["merged"] = mixed(fed, local, weight, self.space, own_head=self.head == "own")
        if self.grid and (scores := await curve(client, fed, local, self.space, own_head=self.head == "own")):
            recipe["grid"] = scores
        client.memory["recipe"] = recipe

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory["merged"]

    def _weigh(self, found: Evidence, layout: Layout, counted: Sequence[str]) -> dict[str, Any]:
        """lambda_fed, the traces and the weights for other dampings: one of each, or one for each factor."""

        def weigh(names: Sequence[str]) -> dict[str, Any]:
            where = layout.joined(names)
            of = traces(found.moments, found.fisher, self.damping, where)
            values = {"lambda_fed": of.weight, "a": of.a, "b": of.b, "c": of.c}
            return rounded(values) | {"sweep": rounded(sweep(found.moments, found.fisher, where))}

        if not self.per_factor:
            return weigh(counted)
        names: dict[str, list[str]] = {}
        for name in counted:
            names.setdefault(factor_of(name), []).append(name)
        weighed = {factor: weigh(own) for factor, own in names.items()}
        return {
            key: {factor: values[key] for factor, values in weighed.items()} for key in next(iter(weighed.values()))
        }
