"""Scores, 0-100: one number for a client's predictions, and the summary of a score over the clients."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any, Literal

from llm_fed.basics.errors import UserError, listed
from llm_fed.basics.names import same_name
from llm_fed.scoring import metrics, own_metric
from llm_fed.scoring.metrics import Prediction, Reference
from llm_fed.settings import objects, plugins

# Below a table in which "-" stands for the score of a client that has none.
NOT_SCORED = "-: the client has no example to be scored on; means and worst halves are those of the others."

CLASSIFIED = ("labels", "values")  # what metrics read of the logits of a classifier


def not_defined(metric: str, clients: Sequence[str]) -> str:
    """The sentence on clients for whose examples a metric says nothing."""
    return (
        f"{metric} is not defined here, and counts in no mean, for {listed(clients)}: labels or numbers are all the "
        "same, or the metric says so."
    )


@dataclass(frozen=True)
class Metric:
    compute: Callable[..., float] | None  # of predictions and references; None: of a loss, or one from outside
    # what a model answers: labels are those of a classifier, values numbers, and of a loss it answers nothing
    scores: Literal["texts", "options", "labels", "values", "loss", "preferences"] = "texts"
    one_option: bool = False  # whether an answer counts only if it names exactly one of the example's options
    outside: Any = None  # what computes one from outside, see `own_metric`
    negative: bool = False  # whether it may be below 0, down to -100
    two_labels: bool = False  # whether it is defined for two labels alone
    can_score: Callable[[str], bool] | None = None  # whether an answer equal to this reference scores above 0
    is_mean: bool = True  # whether it is the mean of the scores of single examples


PREFERENCE = "preference_accuracy"  # see `preferences`
OF_ANSWERS = "rouge1"  # by which answers are scored beside a preference_accuracy, on the test split
BESIDE = (PREFERENCE, "margin", OF_ANSWERS)  # what may be measured beside a score
METRICS = {
    "rouge1": Metric(partial(metrics.rouge, "rouge1"), can_score=partial(metrics.has_words, 1)),
    "rouge2": Metric(partial(metrics.rouge, "rouge2"), can_score=partial(metrics.has_words, 2)),
    "rougeL": Metric(partial(metrics.rouge, "rougeL"), can_score=partial(metrics.has_words, 1)),
    "exact_match": Metric(metrics.exact_match),
    "option_accuracy": Metric(metrics.option_accuracy, "options", one_option=True),
    "commonsense_accuracy": Metric(metrics.commonsense_accuracy, one_option=True, can_score=metrics.ends_in_its_answer),
    "squad_f1": Metric(metrics.squad_f1, can_score=lambda text: bool(metrics.squad_words(text))),
    "squad_em": Metric(metrics.squad_em),
    "accuracy": Metric(metrics.accuracy, "labels"),
    "f1": Metric(metrics.f1, "labels", two_labels=True, is_mean=False),
    "f1_macro": Metric(metrics.f1_macro, "labels", is_mean=False),
    "matthews": Metric(metrics.matthews, "labels", negative=True, is_mean=False),
    "pearson": Metric(metrics.pearson, "values", negative=True, is_mean=False),
    "spearman": Metric(metrics.spearman, "values", negative=True, is_mean=False),
    "token_likelihood": Metric(None, "loss"),
    PREFERENCE: Metric(None, "preferences"),
}


def find(name: str, key: str = "eval.metric", *, labelled: bool = False) -> Metric:
    """The metric that a name stands for: of the table, or from outside, which reads texts, or where data are `labelled`
    labels. UserError: there is none, or it is no metric."""
    if (known := same_name(name, METRICS)) is not None:
        return METRICS[known]
    if objects.is_object(name):
        thing = objects.find("eval.metric", name)
    elif name.startswith(plugins.EVALUATE):
        plugins.check_allowed(key, name, plugins.METRICS)
        thing = own_metric.of_evaluate(name)
    else:
        thing = plugins.find(key, name, plugins.METRICS, METRICS)
    own_metric.check(key, name, thing)
    return Metric(None, "labels" if labelled else "texts", outside=thing, is_mean=False)


def reads_texts(name: str) -> bool:
    """Whether a metric is known to score what a language model says; it may be one from outside, which is not run."""
    return name not in METRICS or METRICS[name].scores in ("texts", "options")


def with_range(metric: str) -> str:
    """The name of a metric with the numbers that it may be, `accuracy (0-100)`."""
    return f"{metric} ({'-100 to 100' if metric in METRICS and METRICS[metric].negative else '0-100'})"


@dataclass(frozen=True)
class Summary:
    """One metric over the clients. `std` is the population's (divided by n: the clients are all there are), so one
    client has std 0. `worst_half` is the mean of the ceil(n / 2) lowest clients."""

    metric: str
    clients: dict[str, float]  # client id -> score, 0-100; of correlations from -100 on
    mean: float  # every client counts once, whatever its number of examples
    std: float
    worst_half: float
    loss: float | None  # mean over the clients of `losses`; None without any, or where one is None
    # client id -> mean loss per target token, or per picture, on the same examples under the same model; None where it
    # is not finite. A client without an example that fits into training's length is missing.
    losses: dict[str, float | None]
    unscored: tuple[str, ...] = ()  # clients without a score; they are in no other field but the next
    undefined: tuple[str, ...] = ()  # of these the ones that have examples of the split
    # client id -> score of each example, 0-100, where they were requested; not in the JSON
    examples: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False, compare=False)
    # client id -> what a language model answered to its examples; not in the JSON
    predictions: Mapping[str, Sequence[Prediction]] = field(default_factory=dict, repr=False, compare=False)
    # what was measured beside: name -> client id -> number, such as the margin of preferences
    beside: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        beside, _, _ = (fields.pop(key) for key in ("beside", "examples", "predictions"))
        names = {key: list(fields.pop(key)) for key in ("unscored", "undefined")}
        fields |= {key: ids for key, ids in names.items() if ids}
        each = {name: {"mean": fmean(sorted(of.values())), "clients": of} for name, of in beside.items() if of}
        return fields | ({"beside": each} if each else {})


def summarize(
    metric: str,
    clients: dict[str, float],
    losses: Mapping[str, float | None] | None = None,
    unscored: Iterable[str] = (),
    beside: Mapping[str, Mapping[str, float]] | None = None,
) -> Summary:
    """The summary of one score per client, of their losses as far as they are known, of the clients without a score,
    and of what was measured `beside` at each; the same bits in any order of clients. UserError without any score."""
    if not clients:
        raise UserError(f"No client has a {metric} score: there is nothing to summarise. Does the split have examples?")
    values = sorted(clients.values())
    mean = fmean(values)
    std = math.sqrt(fmean((value - mean) ** 2 for value in values))
    own_losses = {id: loss if loss is not None and math.isfinite(loss) else None for id, loss in (losses or {}).items()}
    finite = [loss for loss in own_losses.values() if loss is not None]
    loss = fmean(finite) if finite and len(finite) == len(own_losses) else None
    worst_half = fmean(values[: (len(values) + 1) // 2])
    by_name: dict[str, dict[str, float]] = {}
    for id, own in (beside or {}).items():
        for name, value in own.items():
            by_name.setdefault(name, {})[id] = value
    return Summary(metric, dict(clients), mean, std, worst_half, loss, own_losses, tuple(unscored), beside=by_name)


def without(line: Mapping[str, Any], clients: Collection[str]) -> dict[str, Any]:
    """A line of scores as it would be without these clients, where others remain."""
    kept = {id: score for id, score in line["clients"].items() if id not in clients}
    if not kept or len(kept) == len(line["clients"]):
        return dict(line)
    losses = {id: loss for id, loss in line.get("losses", {}).items() if id in kept}
    beside = {
        name: {id: value for id, value in of["clients"].items() if id in kept}
        for name, of in line.get("beside", {}).items()
    }
    summary = summarize(line["metric"], kept, losses, line.get("unscored", ()))
    return {**line, **dataclasses.replace(summary, beside=beside).as_json()}


ABILITY = "base ability"  # what is measured beside with `eval.ability`: the token_likelihood of a fixed text


def likelihood(loss: float) -> float:
    """The token_likelihood (0-100) of a mean loss per token: 100 / perplexity."""
    return 100 * math.exp(-loss)


def score(metric: str, predictions: Sequence[Prediction], references: Sequence[Reference]) -> float:
    """The score of predictions, 0-100. UserError: an unknown metric, no example, or one without a reference.
    `predictions`: a text per example; of option_accuracy also the log-likelihoods of the example's options, of labels
    the index of one, and of values a number. `references`: as many; a tuple of right texts per example, with
    log-likelihoods the index of the right option, with labels the right one's, and with values the right number."""
    own = find(metric, "metric")
    if not predictions:
        raise UserError("There are no predictions to score: the split holds no example for this client.")
    if len(references) != len(predictions):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} references")
    for number, texts in enumerate(references):
        if not isinstance(texts, int | float) and not texts:
            raise UserError(
                f"Example {number} has no reference answer, so it cannot be scored. Remove it from the split."
            )
    if own.outside is not None:
        return own_metric.compute(metric, own.outside, predictions, references)
    assert own.compute is not None  # scores of losses and preferences are made elsewhere
    return own.compute(predictions, references)


def score_each(metric: str, predictions: Sequence[Prediction], references: Sequence[Reference]) -> list[float]:
    """The score of each example alone; their mean is `score`. Of a metric that is no such mean nothing."""
    if not find(metric, "metric").is_mean:
        return []
    pairs = zip(predictions, references, strict=True)
    return [score(metric, [prediction], [reference]) for prediction, reference in pairs]


def without_credit(metric: str, references: Sequence[Sequence[str]]) -> list[int]:
    """The positions of those examples where even an answer that equals one of its references scores 0, as when a text
    has no word that the metric counts. UserError for an unknown metric, or a reference that it cannot read."""
    can_score = find(metric, "metric").can_score
    if can_score is None:
        return []
    return [n for n, texts in enumerate(references) if texts and not any(map(can_score, texts))]
