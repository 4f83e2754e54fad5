"""Scores every client under its own personal model, all clients' rows in the same batches."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from llm_fed.errors import UserError
from llm_fed.eval.scores import METRICS, Summary, credits_all, score, summarize, without_credit
from llm_fed.requests import Query
from llm_fed.runs.folder import rounded
from llm_fed.site import Data, Site
from llm_fed.state import State
from llm_fed.tasks.common import Example, Picture, labels_of

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
    """Each client's score (0-100) and loss on its own `split`; None where no client has that split. A client that has
    no example of it is named as unscored.

    Args:
        limit: at most this many examples per client.
        listen: is given each client's predictions as `predict` returns them, in the order of its queries.
    """
    asked = {name: client for name, client in clients.items() if client.data.queries.get(split)}
    if not asked:
        return None
    outcomes = runtime.run(
        {name: measure(personal, client, split, metric, limit, listen) for name, client in asked.items()}
    )
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    losses = {name: rounded(loss) for name, (_, loss) in outcomes.items() if loss is not None}
    scores = {name: score for name, (score, _) in outcomes.items()}
    return summarize(metric, scores, losses, [name for name in clients if name not in asked])


def check_options(client: str, data: Data) -> None:
    """Refuse data without options for option_accuracy, before anything is trained.

    Raises:
        UserError: an example has no option that equals its answer.
    """
    for split, queries in data.queries.items():
        for number, query in enumerate(queries):
            if query.correct < 0:
                raise UserError(
                    f"client {client}: {split} example {number} has no option that equals its answer, so there is "
                    "no option_accuracy; use eval.metric=exact_match, or name the column in task.columns.options"
                )


def notes_without_credit(sites: Iterable[Site], metric: str) -> list[str]:
    """A warning for each split with examples that score 0 whatever is answered, so that a low score is no surprise.

    Raises:
        UserError: a reference that the metric cannot read.
    """
    if credits_all(metric):
        return []
    asked: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    for site in sites:
        for split, queries in site.data.queries.items():
            given = getattr(queries, "examples", queries)  # whose tokens are not needed, see `Encodings`
            known = ((site.id, each.answers) for each in given if isinstance(each, Query | Example))
            asked.setdefault(split, []).extend(known)
    notes = []
    for split, pairs in asked.items():
        found = without_credit(metric, [answers for _, answers in pairs])
        if found:
            client, answers = pairs[found[0]]
            notes.append(
                f"warning: {len(found)} of {len(pairs)} {split} examples score 0 under {metric} whatever is answered, "
                f"since {metric} finds too little in their references to compare, e.g. {answers[0][:60]!r} of "
                f"client {client}; use exact_match (eval.metric=exact_match), which compares whole texts"
            )
    return notes


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
    if METRICS[metric].scores == "labels":  # the logits say both
        logits = await client.logits(theta, queries)
        return _score_labels(metric, logits, queries), float(cross_entropy(logits, labels_of(queries)))
    predictions = await predict(client, theta, queries, metric)
    listen(client.id, predictions)
    return _score(metric, predictions, queries), await client.loss_of_answers(theta, queries)


async def score_split(
    client: Site, theta: State, split: str, metric: str | None = None, limit: int | None = None
) -> float:
    """A client's score (0-100) on its own `split` under `theta`; the metric is the run's, unless one is given."""
    metric = metric or client.data.metric
    queries = client.data.queries[split][:limit]
    if METRICS[metric].scores == "labels":
        return _score_labels(metric, await client.logits(theta, queries), queries)
    return _score(metric, await predict(client, theta, queries, metric), queries)


async def predict(client: Site, theta: State, queries: Sequence[Query], metric: str) -> Sequence[Any]:
    """What a client's model says to queries of text, as the metric reads it: a text for each, or the log-likelihoods of
    its options."""
    if METRICS[metric].scores == "options":
        return await client.option_scores(theta, queries)
    return await client.generate(theta, [query.prompt for query in queries])


def _score(metric: str, predictions: Sequence[Any], queries: Sequence[Query]) -> float:
    options = METRICS[metric].scores == "options"
    return score(metric, predictions, [query.correct if options else query.answers for query in queries])


def _score_labels(metric: str, logits: Tensor, pictures: Sequence[Picture]) -> float:
    return score(metric, logits.argmax(-1).tolist(), [picture.label for picture in pictures])
