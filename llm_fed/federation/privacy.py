"""Differential privacy of clients or of their examples: clipping, Gaussian noise, and the epsilon that it buys.

`privacy.unit=client`: noise on what clients send.
`privacy.where=server` (central) is DP-FedAvg with a fixed denominator (McMahan, Ramage, Talwar, Zhang 2018, "Learning
Differentially Private Recurrent Language Models"): the method's server step sees one upload, the noisy mean of the
clipped ones, so it must need no more (`Method.mean_only`). The neighbour of a federation is one with a client more or
less, each round asks each client with probability `participation`, and the server is trusted.
`privacy.where=client` (local): each client adds the noise itself, so that the server is not trusted. Neighbours differ
in one client's data. Two uploads of one client are up to 2 * clip apart, so a noise multiplier z counts as z / 2, once
for each time that the client was asked, without amplification.
`privacy.unit=example` is DP-SGD (Abadi et al. 2016) at each client: every optimizer step takes each example with
probability `local.batch_size / n`, clips its gradient, adds noise to the sum and divides by `local.batch_size`.
Neighbours differ in one training example of a client; n is taken as known. All fits of a client are counted, also those
of what it keeps to itself, so uploads and personal models alike are post-processing of noisy steps.
Numbers of examples, which uploads would otherwise be weighed by, count as 1.

All that hides data is drawn from a secret (`rng.Secret`), which the run keeps to go on as if nothing had happened.
Epsilon is that of the privacy loss distribution (Koskela, Jaelkoe, Honkela 2020; Doroshenko et al. 2022). Rounding of
floating-point numbers (Mironov 2012) is not accounted for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, install, refuse
from llm_fed.basics.rng import Secret
from llm_fed.method import Method, Upload
from llm_fed.method.client import NOISY_STEPS
from llm_fed.method.requests import PerExample
from llm_fed.method.site import Site
from llm_fed.settings.config import Config, PrivacyConfig
from llm_fed.state import State
from llm_fed.state.wire import Message

_WIDTHS, _BINS = (1e-5, 1e-2), 2e5  # of bins of privacy losses, least and largest width; about at most so many


def at_clients(settings: PrivacyConfig) -> bool:
    """Whether clients add the noise, so that the server need not be trusted."""
    return settings.clip is not None and not settings.central


def of_examples(settings: PrivacyConfig, secret: Secret) -> PerExample | None:
    """How a client hides its examples, with batches and noise of this secret; None where it does not."""
    if not settings.by_example:
        return None
    assert settings.clip is not None
    return PerExample(settings.clip, settings.noise, 0, secret)  # each fit has a size


def check(config: Config, method: Method) -> None:
    """Refuse a run with `privacy.clip` that could not give what it promises. UserError: what does not go together, or
    that the accountant is not installed."""
    name, private, late = config.method["name"], config.privacy, config.delay
    examples, at_server = private.by_example, private.central
    reasons = {
        f"{name} gathers the rows of all clients in one place, which keeps no privacy; leave privacy out":
            method.gathers,
        f"privacy.clip is for methods with rounds, but {name} merges finished runs; set it to null":
            bool(method.parents),
        "privacy.unit=example clips the gradient of each example, but the loss of KTO compares each with others of its "
        "batch; set privacy.unit=client, or objective.name=dpo with pairs": examples and config.objective.name == "kto",
        "privacy.unit=example clips gradients of adapters, but adapter is null; set adapter.rank, or "
        "privacy.unit=client": examples and config.adapter is None,
        f"privacy.unit=example only protects examples in training steps, but clients of {name} also use them in other "
        "ways; choose another method, or privacy.unit=client": examples and method.looks,
        f"privacy.where=server needs a method whose server only uses the mean of the uploads, and {name} is not one; "
        "set privacy.where=client": at_server and not method.mean_only,
        "privacy.where=server needs delay.sigma=0 and delay.drop_out=0; set these, or privacy.where=client":
            at_server and (late.sigma > 0 or late.drop_out > 0),
    }  # fmt: skip
    refuse(reasons)
    _accounting()


def check_upload(upload: Message) -> None:
    """UserError: an upload, or what stands for it, holds anything but the numbers of one state."""
    if isinstance(upload, State) and not upload.extras:
        return
    held = "running statistics" if isinstance(upload, State) else type(upload).__name__
    raise UserError(
        f"privacy.clip is for uploads of one state of parameters, but those of this method hold {held}, which would be "
        "sent without noise; set it to null"
    )


def clipped(state: State, bound: float) -> State:
    """The state, scaled down to the norm `bound` if it is longer; one that is not finite stays so."""
    norm = float(torch.linalg.vector_norm(state.row, dtype=torch.float64))
    if norm <= bound:
        return state
    short = 1 - torch.finfo(state.row.dtype).eps  # rounding must not make it longer than the bound
    return state.like((state.row.double() * (short * bound / norm)).to(state.row.dtype))


def noised(row: torch.Tensor, deviation: float, secret: Secret) -> torch.Tensor:
    """The row (P,) in float64 with Gaussian noise of this standard deviation on each number."""
    return row.double() + deviation * secret.gaussians(len(row))


def protected(upload: Message, settings: PrivacyConfig, secret: Secret, round: int, client: str) -> Message:
    """What a client sends instead of its upload: the clipped one, with noise if the client adds it."""
    if settings.clip is None or settings.by_example:
        return upload
    check_upload(upload)
    upload = clipped(upload, settings.clip)
    if settings.where == "server":
        return upload
    row = noised(upload.row, settings.noise * settings.clip, secret.of("noise of a client", round, client))
    return upload.like(row.to(upload.row.dtype))


def noisy_mean(
    uploads: Sequence[Upload], like: State, config: Config, clients: int, secret: Secret, round: int
) -> list[Upload]:
    """The noisy mean of what arrived in a round, perhaps nothing, as one upload (`privacy.where=server`).

    The sum is divided by the mean size of a cohort of all `clients`, however many arrived. Uploads are clipped here
    too, since compression (`transport`), or a client, may have made them longer. `like`: an upload.
    """
    privacy = config.privacy
    assert privacy.clip is not None  # see `PrivacyConfig.central`
    total = torch.zeros(like.layout.size, dtype=torch.float64)
    for upload in uploads:
        total += clipped(upload.content, privacy.clip).row
    row = noised(total, privacy.noise * privacy.clip, secret.of("noise of the server", round))
    mean = row / (config.participation * clients)
    return [Upload("cohort", 1, 0, like.like(mean.to(like.row.dtype)))]


def spent(config: Config, round: int, most_asked: Callable[[int], int], sites: Iterable[Site]) -> dict[str, Json]:
    """What metrics.jsonl says of the privacy after a round; an infinite epsilon is None there. `most_asked`: in how
    many of the first so many rounds a client was asked, at most. `sites`: those that count noisy steps."""
    settings = config.privacy
    if settings.by_example:
        # By number of steps the largest rate, which comes last: one of them has the largest epsilon.
        rates = dict(sorted((steps, rate) for rate, steps in map(noisy_steps, sites)))
        found = [_epsilon(settings.noise, rate, steps, settings.delta) for steps, rate in rates.items()]
        return {"epsilon": shown(max(found, default=0.0)), "delta": settings.delta, "unit": settings.unit}
    value = epsilon(settings, config.participation, round if settings.central else most_asked(round))
    return {"epsilon": shown(value), "delta": settings.delta, "where": settings.where}


def spent_by(settings: PrivacyConfig, site: Site) -> float:
    """The epsilon of one client's examples after all of its noisy steps; infinite without noise. Every step counts as
    if it sampled at the largest rate of any."""
    return _epsilon(settings.noise, *noisy_steps(site), settings.delta)


def noisy_steps(site: Site) -> tuple[float, int]:
    """The largest rate and the number of the noisy steps that a site remembers."""
    counted = site.memory.get(NOISY_STEPS, {"rate": 0.0, "steps": 0})
    return counted["rate"], counted["steps"]


def shown(epsilon: float) -> float | None:
    """An epsilon as JSON holds it: None where it is infinite."""
    return float(f"{epsilon:.6g}") if math.isfinite(epsilon) else None


def epsilon(settings: PrivacyConfig, participation: float, times: int) -> float:
    """The epsilon of (epsilon, delta)-differential privacy after so many rounds (of a client, under `client`: after it
    was asked so many times), by its privacy loss distribution; infinite without noise."""
    if settings.where == "client":
        return _epsilon(settings.noise / 2, 1.0, times, settings.delta)
    return _epsilon(settings.noise, participation, times, settings.delta)


def released(settings: PrivacyConfig, rate: float, steps: int) -> dict[tuple[float, float], int]:
    """What the answer of one client releases, by noise multiplier and rate of sampling how often, as `composed` takes
    it; `steps` at that `rate` are those of its fits."""
    if settings.by_example:
        return {(settings.noise, rate): steps} if steps else {}
    return {(settings.noise / 2 if at_clients(settings) else 0.0, 1.0): 1}


def composed(releases: Mapping[tuple[float, float], int], delta: float) -> float:
    """The epsilon of all that was `released`; several kinds add up, each with its part of
    delta (Dwork et al. 2006)."""
    return sum(_epsilon(*kind, times, delta / len(releases)) for kind, times in releases.items())


@lru_cache(maxsize=4096)
def _epsilon(noise: float, rate: float, times: int, delta: float) -> float:
    """Of a Gaussian with this multiplier on a sum, so many times, whose terms are each there with probability `rate`
    (Poisson sampling), for one term more or less.

    Without sampling it is exact (Balle and Wang 2018, Theorem 8), as so many Gaussians are one. Else it is an upper
    bound: losses are rounded up to bins, whose width follows from the deviation of one loss and from how far all reach.
    """
    if not times or not noise:
        return math.inf if times else 0.0
    dp, _ = _accounting()
    whole = float(dp.get_epsilon_gaussian(noise / math.sqrt(times), delta))
    if rate == 1:
        return whole
    deviation = rate * math.sqrt(math.expm1(min(noise**-2, 700.0)))
    reach = min(whole, float(dp.get_epsilon_gaussian(1 / (deviation * math.sqrt(times)), delta)))
    width = max(min(deviation / 8, _WIDTHS[1]), reach / _BINS, _WIDTHS[0])
    return float(_losses(noise, rate, 2.0 ** round(math.log2(width))).self_compose(times).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _losses(noise: float, rate: float, width: float) -> Any:
    """The privacy losses of one such sum, in bins of this width."""
    _, losses = _accounting()
    return losses.from_gaussian_mechanism(noise, sampling_prob=rate, value_discretization_interval=width)


def together(runs: Sequence[Mapping[str, Any] | None]) -> str:
    """What runs on the same rows have spent in all, as a sentence; empty where none has privacy. `runs`: of each what
    `spent` says of it, None where it has no privacy."""
    private = [run for run in runs if run]
    if not private:
        return ""
    if len(private) < len(runs):
        return (
            f"Nothing is promised to whoever sees all of these {len(runs)} runs, which learned from the same rows, as "
            f"{len(runs) - len(private)} of them had no privacy."
        )
    known = [run["epsilon"] for run in private]
    total = _text(None if None in known else sum(known))
    return (
        f"Whoever sees all of these {len(runs)} runs, which learned from the same rows, sees epsilon = {total} at "
        f"delta = {sum(run['delta'] for run in private):g}: the sums of their own."
    )


def statement(settings: PrivacyConfig, privacy: Mapping[str, Any], site: Site, own: bool) -> str:
    """The sentence of a model card.

    Args:
        privacy: what `spent` says of the run.
        site: whose model it is.
        own: whether the model also holds what its client learned from its own data and sent to nobody.
    """
    if settings.by_example:
        return (
            "Example-level (epsilon, delta)-differential privacy by the Gaussian mechanism: "
            f"epsilon = {_text(shown(spent_by(settings, site)))} at delta = {privacy['delta']:g} for the training "
            f"examples of {site.id}, and at most {_text(privacy['epsilon'])} for those of any client; "
            f"clip {settings.clip:g}, noise multiplier {settings.noise:g}, added in every optimizer step. It covers "
            "this model and what clients sent, for a training example more or less, over all rounds; scores, and the "
            "choice of a round by them, are not covered."
        )
    epsilon = _text(privacy["epsilon"])
    by, covers = {
        "server": ("the server to the sum of the uploads", "what clients are sent, for a client more or less"),
        "client": ("each client to its uploads", "what the server receives of a client, for any change of its data"),
    }[privacy["where"]]
    return (
        "Client-level (epsilon, delta)-differential privacy by the Gaussian mechanism: "
        f"epsilon = {epsilon} at delta = {privacy['delta']:g}, clip {settings.clip:g}, noise multiplier "
        f"{settings.noise:g}, added by {by}. It covers {covers}, over all rounds; scores, and the choice of a round by "
        "them, are not covered."
        + (" This model also holds what its client learned and never sent, which is not covered either." if own else "")
    )


def _text(epsilon: float | None) -> str:
    return "infinite (no noise)" if epsilon is None else f"{epsilon:.3g}"


def _accounting() -> tuple[ModuleType, ModuleType]:
    """(dp_accounting, its module of privacy loss distributions)."""
    try:
        import dp_accounting
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise UserError(
            f"privacy.clip needs the accountant dp-accounting, which is not installed; {install('privacy')}"
        ) from error
    return dp_accounting, privacy_loss_distribution
