"""Scores every client under its own personal model, all clients' rows in the same batches."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from llm_fed.basics.errors import UserError
from llm_fed.basics.figures import rounded
from llm_fed.method.requests import Query
from llm_fed.method.site import Data, Site
from llm_fed.scoring.scores import CLASSIFIED, METRICS, Summary, likelihood, score, summarize
from llm_fed.state import State
from llm_fed.tasks.common import labels_of

Personal = Callable[[Site], Coroutine[Any, Any, State]]  # a client's personal model, e.g. `Method.personalize`


def evaluate(
    personal: Personal,
    clients: Mapping[str, Site],
    runtime: Any,
    *,
    split: str,
    metric: str,
    limit: int | None = None,
    listen: Callable[[str, Sequence[Any]], None] = lambda client, predictions: None,
) -> Summary | None:
    """Each client's score (0-100) and loss on its own `split`, of `limit` examples at most; None where no client has
    that split. A client that has no example of it is named as unscored. `listen` is given each client's predictions as
    `predict` returns them, in the order of its queries."""
    asked = {name: client for name, client in clients.items() if client.data.queries.get(split)}
    if not asked:
        return None
    work = {name: measure(personal, client, split, metric, limit, listen) for name, client in asked.items()}
    outcomes = runtime.run(work)
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    losses = {name: rounded(loss) for name, (_, loss) in outcomes.items() if loss is not None}
    scores = {name: score for name, (score, _) in outcomes.items()}
    return summarize(metric, scores, losses, [name for name in clients if name not in asked])


def check_options(client: str, data: Data) -> None:
    """UserError, before training, for data without options for option_accuracy: none equals an example's answer."""
    for split, queries in data.queries.items():
        for number, query in enumerate(queries):
            if not query.correct:
                example = queries.examples[number] if hasattr(queries, "examples") else None
                which = f", {example.answers[0]!r:.60}, among {example.options!r:.120}" if example else ""
                raise UserError(
                    f"client {client}: {split} example {number} has no option that equals its answer{which}, so there "
                    "is no option_accuracy; use eval.metric=exact_match, or name the column in task.columns.options"
                )


async def measure(
    personal: Personal,
    client: Site,
    split: str,
    metric: str,
    limit: int | None,
    listen: Callable[[str, Sequence[Any]], None] = lambda client, predictions: None,
) -> tuple[float, float | None]:
    """One client's score (0-100) and loss (None where it has none), both of the same examples under the same model."""
    theta, queries = await personal(client), client.data.queries[split][:limit]
    if METRICS[metric].scores in CLASSIFIED:  # the logits say both
        logits = await client.logits(theta, queries)
        return _score_labels(metric, logits, queries), _loss(metric, logits, labels_of(queries))
    if METRICS[metric].scores == "loss":
        return await _likelihood(client, theta, queries)
    predictions = await predict(client, theta, queries, metric)
    listen(client.id, predictions)
    return _score(metric, predictions, queries), await client.loss_of_answers(theta, queries)


async def score_split(client: Site, theta: State, split: str) -> float:
    """A client's score (0-100) on its own `split` under `theta`, by the run's metric."""
    metric, queries = client.data.metric, client.data.queries[split]
    if METRICS[metric].scores in CLASSIFIED:
        return _score_labels(metric, await client.logits(theta, queries), queries)
    if METRICS[metric].scores == "loss":
        return (await _likelihood(client, theta, queries))[0]
    return _score(metric, await predict(client, theta, queries, metric), queries)


async def predict(client: Site, theta: State, queries: Sequence[Query], metric: str) -> Sequence[Any]:
    """What a model says to queries of text, as the metric reads it: texts, or log-likelihoods of options."""
    if METRICS[metric].scores == "options":
        return await client.option_scores(theta, queries)
    return await client.generate(theta, [query.prompt for query in queries])


async def _likelihood(client: Site, theta: State, queries: Sequence[Query]) -> tuple[float, float]:
    loss = await client.loss_of_answers(theta, queries)
    if loss is None:
        raise UserError(f"client {client.id}: none of {len(queries)} examples fits into task.max_length; raise it")
    return likelihood(loss), loss


def _score(metric: str, predictions: Sequence[Any], queries: Sequence[Query]) -> float:
    options = METRICS[metric].scores == "options"
    return score(metric, predictions, [query.correct if options else query.answers for query in queries])


def _score_labels(metric: str, logits: Tensor, examples: Sequence[Any]) -> float:
    said = logits.squeeze(-1) if METRICS[metric].scores == "values" else logits.argmax(-1)
    return score(metric, said.tolist(), [example.label for example in examples])


def _loss(metric: str, logits: Tensor, right: Tensor) -> float:
    """The mean over the examples, as in training."""
    if METRICS[metric].scores == "values":
        return float(mse_loss(logits.squeeze(-1), right.to(logits)))
    return float(cross_entropy(logits, right))
