"""Scores, 0-100: one number for a client's predictions, and the summary of a score over the clients."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import ModuleType
from typing import Any, Literal

from llm_fed.basics.errors import UserError, lookup

# Below a table in which "-" stands for the score of a client that has none.
NOT_SCORED = "-: the client has no example to be scored on; means and worst halves are those of the others."


@dataclass(frozen=True)
class Metric:
    module: str  # in metrics/, which computes it; empty: the loss says all
    # what a model answers: labels are those of images, and of a loss it answers nothing
    scores: Literal["texts", "options", "labels", "loss"] = "texts"
    one_option: bool = False  # whether an answer counts only if it names exactly one of the example's options


METRICS = {
    "rouge1": Metric("rouge"),
    "rouge2": Metric("rouge"),
    "rougeL": Metric("rouge"),
    "exact_match": Metric("exact_match"),
    "option_accuracy": Metric("option_accuracy", "options", one_option=True),
    "commonsense_accuracy": Metric("commonsense_accuracy", one_option=True),
    "squad_f1": Metric("squad"),
    "squad_em": Metric("squad"),
    "accuracy": Metric("accuracy", "labels"),
    "token_likelihood": Metric("", "loss"),
}


@dataclass(frozen=True)
class Summary:
    """One metric over the clients. `std` is the population's (divided by n: the clients are all there are), so one
    client has std 0. `worst_half` is the mean of the ceil(n / 2) lowest clients."""

    metric: str
    clients: dict[str, float]  # client id -> score, 0-100
    mean: float  # every client counts once, whatever its number of examples
    std: float
    worst_half: float
    loss: float | None  # mean over the clients of `losses`; None without any, or where one is None
    # client id -> mean loss per target token, or per picture, on the same examples under the same model; None where it
    # is not finite. A client without an example that fits into training's length is missing.
    losses: dict[str, float | None]
    unscored: tuple[str, ...] = ()  # clients without an example of the split; they are in no other field

    def as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        unscored = fields.pop("unscored")
        return fields | ({"unscored": list(unscored)} if unscored else {})


def summarize(
    metric: str,
    clients: dict[str, float],
    losses: Mapping[str, float | None] | None = None,
    unscored: Iterable[str] = (),
) -> Summary:
    """The summary of one score per client, of their losses as far as they are known, and of the clients without a
    score; the same bits in any order of clients. UserError without any score."""
    if not clients:
        raise UserError(f"No client has a {metric} score: there is nothing to summarise. Does the split have examples?")
    values = sorted(clients.values())
    mean = fmean(values)
    std = math.sqrt(fmean((value - mean) ** 2 for value in values))
    own_losses = {id: loss if loss is not None and math.isfinite(loss) else None for id, loss in (losses or {}).items()}
    finite = [loss for loss in own_losses.values() if loss is not None]
    loss = fmean(finite) if finite and len(finite) == len(own_losses) else None
    worst_half = fmean(values[: (len(values) + 1) // 2])
    return Summary(metric, dict(clients), mean, std, worst_half, loss, own_losses, tuple(unscored))


def without(line: Mapping[str, Any], clients: Collection[str]) -> dict[str, Any]:
    """A line of scores as it would be without these clients, where others remain."""
    if not clients:
        return dict(line)
    kept = {id: score for id, score in line["clients"].items() if id not in clients}
    if not kept or len(kept) == len(line["clients"]):
        return dict(line)
    losses = {id: loss for id, loss in line.get("losses", {}).items() if id in kept}
    return {**line, **summarize(line["metric"], kept, losses, line.get("unscored", ())).as_json()}


def likelihood(loss: float) -> float:
    """The token_likelihood (0-100) of a mean loss per token: 100 / perplexity."""
    return 100 * math.exp(-loss)


def score(metric: str, predictions: Sequence[Any], references: Sequence[Any]) -> float:
    return score_all([metric], predictions, references)[metric]


def score_all(metrics: Iterable[str], predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Several metrics of the same predictions, 0-100 each; those of one module share one pass over the texts.

    A prediction is a text per example; of option_accuracy also the log-likelihoods of the example's options, and of
    accuracy the index of a label. A reference is a tuple of right texts per example, with log-likelihoods the index of
    the right option, and with labels the right one's. UserError for an unknown metric, without an example, or for one
    without a reference; ValueError for not as many references as predictions.
    """
    wanted: dict[str, list[str]] = {}
    for metric in metrics:
        wanted.setdefault(_module(metric), []).append(metric)
    if not predictions:
        raise UserError("There are no predictions to score: the split holds no example for this client.")
    if len(references) != len(predictions):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} references")
    for number, texts in enumerate(references):
        if not isinstance(texts, int) and not texts:
            raise UserError(
                f"Example {number} has no reference answer, so it cannot be scored. Remove it from the split."
            )
    results: dict[str, float] = {}
    for module, names in wanted.items():
        settings = {"rouge_types": names} if module == "rouge" else {}
        computed = _load(module).compute(predictions, references, **settings)
        results |= {name: computed[name] for name in names}
    return results


def without_credit(metric: str, references: Sequence[Sequence[str]]) -> list[int]:
    """The positions of those examples where even an answer that equals one of its references scores 0, as when a text
    has no word that the metric counts. UserError for an unknown metric, or a reference that it cannot read."""
    module = _module(metric)
    can_score = getattr(_load(module), "can_score", None) if module else None
    if can_score is None:
        return []
    return [n for n, texts in enumerate(references) if texts and not any(can_score(text, metric) for text in texts)]


def form_of(metric: str) -> Callable[[str], Any] | None:
    """What a metric compares of a text: two texts of one form are the same to it, and one of an empty form is nothing.
    None for a metric that looks for an answer within the text."""
    return getattr(_load(_module(metric)), "form", None)


def _module(metric: str) -> str:
    return lookup("metric", metric, METRICS).module


def _load(module: str) -> ModuleType:
    """The module of a metric; here, because ROUGE takes long to import and most commands score nothing."""
    return importlib.import_module(f"llm_fed.scoring.metrics.{module}")
