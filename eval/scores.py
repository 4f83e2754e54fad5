"""Scores, 0-100: one number for a client's predictions, and the summary of a score over the clients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from llm_fed.errors import UserError, lookup


@dataclass(frozen=True)
class Metric:
    folder: str  # in metrics/, which computes it
    scores: Literal["texts", "options", "labels"] = "texts"  # what a model answers: labels are those of images
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
}


@dataclass(frozen=True)
class Summary:
    """One metric over the clients.

    `std` is the population's (divided by n: the clients are all there are), so one client has std 0.
    `worst_half` is the mean of the ceil(n / 2) lowest clients.
    """

    metric: str
    clients: dict[str, float]  # client id -> score, 0-100
    mean: float  # every client counts once, whatever its number of examples
    std: float
    worst_half: float
    loss: float | None  # mean over the clients of `losses`; None without any, or where one is None
    # client id -> mean loss per target token, or per picture, on the same examples under the same model; None where it
    # is not finite. A client without an example that fits into training's length is missing.
    losses: dict[str, float | None]

    def as_json(self) -> dict[str, Any]:
        """The fields by name: metric, clients, mean, std, worst_half, loss, losses."""
        return dataclasses.asdict(self)


def summarize(metric: str, clients: dict[str, float], losses: Mapping[str, float | None] | None = None) -> Summary:
    """The summary of one score per client, the same bits in any order of clients; UserError without any.

    Args:
        losses: of these clients, where they are known.
    """
    if not clients:
        raise UserError(f"No client has a {metric} score: there is nothing to summarise. Does the split have examples?")
    values = sorted(clients.values())
    mean = fmean(values)
    std = math.sqrt(fmean((value - mean) ** 2 for value in values))
    found = {id: loss if loss is not None and math.isfinite(loss) else None for id, loss in (losses or {}).items()}
    finite = [loss for loss in found.values() if loss is not None]
    loss = fmean(finite) if finite and len(finite) == len(found) else None
    return Summary(metric, dict(clients), mean, std, fmean(values[: (len(values) + 1) // 2]), loss, found)


def score(metric: str, predictions: Sequence[Any], references: Sequence[Any]) -> float:
    """The score of one metric, 0-100: `score_all` for a single metric."""
    return score_all([metric], predictions, references)[metric]


def score_all(metrics: Iterable[str], predictions: Sequence[Any], references: Sequence[Any]) -> dict[str, float]:
    """Several metrics of the same predictions, 0-100 each; those of one module share one pass over the texts.

    Args:
        metrics: names in METRICS.
        predictions: one text per example. option_accuracy takes the log-likelihoods of the example's options,
            or the text of the chosen option; accuracy the index of a label.
        references: a tuple of right texts per example; with log-likelihoods, the index of the right option; with
            labels, the right one's.

    Raises:
        UserError: unknown metric, no example, or an example without a reference.
        ValueError: not as many references as predictions.
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
        computed = _load(module)._compute(predictions, references, **settings)
        results |= {name: computed[name] for name in names}
    return results


def without_credit(metric: str, references: Sequence[Sequence[str]]) -> list[int]:
    """The positions of those examples where even an answer that equals a reference scores 0, as when a text has no word
    that the metric counts.

    Args:
        references: the right texts of each example.

    Raises:
        UserError: unknown metric, or a reference that it cannot read.
    """
    can_score = _can_score(metric)
    if can_score is None:
        return []
    return [
        number
        for number, texts in enumerate(references)
        if texts and not any(can_score(text, metric) for text in texts)
    ]


def credits_all(metric: str) -> bool:
    """Whether an answer that equals its reference never scores 0, whatever that is."""
    return _can_score(metric) is None


def _can_score(metric: str) -> Callable[[str, str], bool] | None:
    return getattr(_load(_module(metric)), "can_score", None)


def _module(metric: str) -> str:
    return lookup("metric", metric, METRICS).folder


@cache
def _load(module: str) -> Any:
    """One instance for all clients. Its `compute` would write the texts of each into an Arrow table, read them back and
    make a hash of both, which takes far longer than to compare them; `_compute` takes the lists as they are."""
    import evaluate  # here, because the import takes seconds and most commands score nothing

    return evaluate.load(str(Path(__file__).parent / "metrics" / module), keep_in_memory=True)
