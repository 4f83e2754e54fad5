"""POTARA: Communication-Efficient Personalized Adaptation via Federated-Local Model Merging (Zou, Shisher, Brinton,
Tripathi).

After FedIT and local training, each client merges its two adapters with the weights that minimise the trace of the
merged posterior's variance (Lemma 3.7), in closed form, from the gradients of a few of its own examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from llm_fed.basics.errors import UserError
from llm_fed.basics.figures import rounded
from llm_fed.merge.moments import Evidence
from llm_fed.merge.potara import sweep, traces
from llm_fed.mergers.mixing import Space, by_training_examples, curve, examples_of, in_delta, mixed
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.models.lora import Lora
from llm_fed.settings import NonNegativeFloat, PositiveInt
from llm_fed.state import Layout, State
from llm_fed.state.entries import FACTORS, HEAD, factor_of

OVERFITTED = 0.05  # nats per target: gradients below it say little about how sure a model is


def one_weight_in_delta(settings: Any) -> None:
    """Refuse a weight per factor where products of factors are mixed."""
    if settings.per_factor and settings.space == "delta":
        raise UserError("method.per_factor=true mixes A and B separately, which method.space=delta cannot; choose one")


@Merger(
    paper="POTARA (Zou et al. 2026)", doubles=in_delta, without_held_out=by_training_examples, of_head=("head",),
    refuse=one_weight_in_delta,
)  # fmt: skip
async def potara(
    client: Client,
    fed: State,
    local: State,
    *,
    samples: PositiveInt = 30,  # N of Eq. 19 and Table 11
    damping: NonNegativeFloat = 1e-3,  # added to F, relative to the mean of F
    fisher: Literal["empirical", "sampled"] = "empirical",  # labels of the data, or drawn from the model
    fisher_data: Literal["train", "held-out"] = "train",  # train: App. B; held-out: the validation examples
    space: Space = "factors",  # factors: App. B; delta: Eq. 3
    per_factor: bool = False,  # one weight for all A, one for all B, each from its own traces
    # An image model's. mixed: by the adapter's weight (`per_factor`: by the mean of the two); own: the local adapter's;
    # traced: it counts in the traces, and has a weight of its own under `per_factor`
    head: Literal["mixed", "own", "traced"] = "mixed",
    grid: bool = False,  # also score the weights 0, 0.1, ..., 1 on the validation examples (App. E)
) -> Merged:
    """One FedIT adapter and one local adapter, merged at each client with a weight in closed form.

    Deviation: the inverse Fisher information is damped (`merge.potara.variances`, `test_damping_bounds_the_trace`).
    Deviation: an image model's head, which App. B does not mention, is left out of the traces, as it would dominate
    them (docs/results/potara.md). `head` says how it is merged.
    Deviation: `fisher: empirical` takes the data's labels, where Eq. 19 takes the model's, so that one pass gives
    Eq. 19 and Eq. 54-57; `sampled` draws them, token by token given the data's prefix (docs/results/log/potara.md).
    """
    examples, said = examples_of(client, samples, fisher_data)
    plain = client.structure
    if isinstance(plain, Lora) and space == "delta":
        plain = replace(plain, rank=plain.rank // 2, alpha=plain.alpha / 2)
    found = await client.gradient_moments(fed, local, examples, sampled=fisher == "sampled", structure=plain)
    counted = [name for name in fed if head == "traced" or factor_of(name) != HEAD]
    recipe = weigh(found, fed.layout, counted, damping, per_factor) | {**said, "losses": rounded(found.losses)}
    if (fisher, fisher_data) == ("empirical", "train") and found.losses[1] < OVERFITTED:
        recipe["note"] = (
            f"the local adapter's loss on the {len(examples)} examples is {found.losses[1]:.2g} nats per target: "
            "it has memorised them, so its gradients nearly vanish and POTARA treats it as very uncertain; try "
            "method.fisher_data=held-out"
        )
    weight = recipe["lambda_fed"]
    if per_factor and head == "mixed":
        weight = {**weight, HEAD: sum(weight[factor] for factor in FACTORS) / len(FACTORS)}
    if grid and (scores := await curve(client, fed, local, space, own_head=head == "own")):
        recipe["grid"] = scores
    return mixed(fed, local, weight, space, own_head=head == "own"), recipe


def weigh(found: Evidence, layout: Layout, counted: Sequence[str], damping: float, per_factor: bool) -> dict[str, Any]:
    """lambda_fed, the traces and the weights for other dampings: one of each, or one for each factor.

    Args:
        layout: of the adapters.
        counted: the entries whose traces count.
    """

    def of(names: Sequence[str]) -> dict[str, Any]:
        where = layout.joined(names)
        trace = traces(found.moments, found.fisher, damping, where)
        values = {"lambda_fed": trace.weight, "a": trace.a, "b": trace.b, "c": trace.c}
        return rounded(values) | {"sweep": rounded(sweep(found.moments, found.fisher, where))}

    if not per_factor:
        return of(counted)
    names: dict[str, list[str]] = {}
    for name in counted:
        names.setdefault(factor_of(name), []).append(name)
    weighed = {factor: of(own) for factor, own in names.items()}
    return {key: {factor: values[key] for factor, values in weighed.items()} for key in next(iter(weighed.values()))}
