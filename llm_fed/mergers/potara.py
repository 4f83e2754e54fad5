"""POTARA: Communication-Efficient Personalized Adaptation via Federated-Local Model Merging (Zou, Shisher, Brinton,
Tripathi).

After FedIT and local training, each client merges its two adapters with the weights that minimise the trace of the
merged posterior's variance (Lemma 3.7), in closed form, from the gradients of a few of its own examples.

In the order (federated, local) everywhere; all rows are float64. Shape letters: P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.basics.names import rounded
from llm_fed.merge.moments import Evidence, Moments
from llm_fed.mergers.mixing import Space, by_training_examples, curve, examples_of, in_delta, mixed
from llm_fed.method.client import Client
from llm_fed.method.merge import Merged, Merger
from llm_fed.settings import NonNegativeFloat, PositiveInt
from llm_fed.state import FACTORS, HEAD, Layout, State, factor_of

DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)  # for which the weight is reported beside the chosen one
WHOLE = (slice(None),)  # a row
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

    Deviation: the inverse Fisher information is damped (`variances`, `test_damping_bounds_the_trace`).
    Deviation: an image model's head, which App. B does not mention, is left out of the traces, as it would dominate
    them (docs/results/potara.md). `head` says how it is merged.
    Deviation: `fisher: empirical` takes the data's labels, where Eq. 19 takes the model's, so that one pass gives
    Eq. 19 and Eq. 54-57; `sampled` draws them, token by token given the data's prefix (docs/results/log/potara.md).
    """
    examples, said = examples_of(client, samples, fisher_data)
    plain: Any = client.structure
    if space == "delta":  # then it was doubled
        plain = replace(plain, rank=plain.rank // 2, alpha=plain.alpha / 2)
    evidence = await client.gradient_moments(fed, local, examples, sampled=fisher == "sampled", structure=plain)
    counted = [name for name in fed if head == "traced" or factor_of(name) != HEAD]
    recipe = weigh(evidence, fed.layout, counted, damping, per_factor) | {**said, "losses": rounded(evidence.losses)}
    if fisher == "empirical" and evidence.losses[1] < OVERFITTED:
        remedies = ["method.fisher_data=held-out"] * (fisher_data == "train") + ["method.grid=true"] * (not grid)
        recipe["note"] = (
            f"the local adapter's loss on the {len(examples)} examples is {evidence.losses[1]:.2g} nats per target: "
            f"it {'has memorised' if fisher_data == 'train' else 'is sure of'} them, so its gradients nearly vanish "
            "and POTARA treats it as very uncertain" + (f"; try {' and '.join(remedies)}" if remedies else "")
        )
    weight = recipe["lambda_fed"]
    if per_factor and head == "mixed":
        weight = {**weight, HEAD: sum(weight[factor] for factor in FACTORS) / len(FACTORS)}
    if grid and (scores := await curve(client, fed, local, space, own_head=head == "own")):
        recipe["grid"] = scores
    return mixed(fed, local, weight, space, own_head=head == "own"), recipe


def weigh(
    evidence: Evidence, layout: Layout, counted: Sequence[str], damping: float, per_factor: bool
) -> dict[str, Any]:
    """lambda_fed, the traces and the weights for other dampings: one of each, or one for each factor. `layout`: of the
    adapters. `counted`: the entries whose traces count."""

    def of(names: Sequence[str]) -> dict[str, Any]:
        where = layout.joined(names)
        trace = traces(evidence.moments, evidence.fisher, damping, where)
        values = {"lambda_fed": trace.weight, "a": trace.a, "b": trace.b, "c": trace.c}
        return rounded(values) | {"sweep": rounded(sweep(evidence.moments, evidence.fisher, where))}

    if not per_factor:
        return of(counted)
    names: dict[str, list[str]] = {}
    for name in counted:
        names.setdefault(factor_of(name), []).append(name)
    weighed = {factor: of(own) for factor, own in names.items()}
    return {key: {factor: values[key] for factor, values in weighed.items()} for key in next(iter(weighed.values()))}


@dataclass(frozen=True)
class Traces:
    """tr(Sigma_fed), tr(Sigma_local) and tr(Sigma_cross) of Eq. 17."""

    a: float
    b: float
    c: float

    @property
    def weight(self) -> float:
        """lambda_fed, within [0, 1]; lambda_local is the rest.

        With a + b - 2c = 0 every weight has the same trace, and it is 1/2. A model whose gradients are all zero has an
        infinite trace and gets no weight; if both have, it is 1/2, too.
        """
        if math.isinf(self.a) or math.isinf(self.b):
            return 0.5 if self.a == self.b else float(math.isinf(self.b))
        curvature = self.a + self.b - 2 * self.c
        if curvature <= 1e-12 * max(self.a, self.b):  # zero, but for rounding
            return 0.5
        return min(1.0, max(0.0, (self.b - self.c) / curvature))


def variances(fisher: Tensor, damping: float) -> Tensor:
    """Sigma = 1 / (F + damping * mean(F)), (2, P), each model with the mean of its own F.

    Deviation: the paper inverts F itself; the trace of that is ruled by the coordinates whose gradients happen to be
    nearly zero, and infinite where one is zero (`test_damping_bounds_the_trace`).
    """
    return (fisher + damping * fisher.mean(1, keepdim=True)).reciprocal()


def correlations(moments: Moments) -> Tensor:
    """rho_k of the gradients at the two models (P,), Eq. 57; 0 where one of them does not vary."""
    spread = moments.variance.prod(0).sqrt()
    return torch.where(spread > 0, moments.covariance / spread, 0.0).clamp(-1, 1)


def cross_variances(rho: Tensor, sigma: Tensor) -> Tensor:
    """The diagonal of Sigma_cross (P,), Eq. 20, with rho clipped by Eq. 58 so that 0 <= it <= both Sigmas."""
    ratio = (sigma[0] / sigma[1]).sqrt()
    clipped = torch.minimum(rho.clamp_min(0), torch.minimum(ratio, ratio.reciprocal()))
    return clipped * sigma.prod(0).sqrt()


def traces(moments: Moments, fisher: Tensor, damping: float, where: Sequence[slice] = WHOLE) -> Traces:
    """a, b and c over the coordinates `where`. `fisher`: (2, P), `moments.fisher` or an estimate with
    other labels. `damping`: relative to the mean of F over the same coordinates."""
    here = torch.cat([fisher[:, span] for span in where], 1)
    if not here.any(1).all():
        a, b = (0.0 if model.any() else math.inf for model in here)
        return Traces(a, b, 0.0)
    rho = torch.cat([correlations(moments)[span] for span in where])
    sigma = variances(here, damping)
    a, b = sigma.sum(1).tolist()
    return Traces(a, b, float(cross_variances(rho, sigma).sum()))


def sweep(moments: Moments, fisher: Tensor, where: Sequence[slice] = WHOLE) -> dict[str, float]:
    """lambda_fed by damping, for DAMPINGS."""
    return {f"{damping:g}": traces(moments, fisher, damping, where).weight for damping in DAMPINGS}
