"""Scores every client under its own personal model, all clients' rows in the same batches."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from llm_fed.errors import UserError
from llm_fed.eval.scores import Summary, score, summarize
from llm_fed.site import Site
from llm_fed.state import State

Personal = Callable[[Site], Coroutine[Any, Any, State]]  # a client's personal model, e.g. `Method.personalize`


def evaluate(
    personal: Personal,
    clients: Mapping[str, Site],
    runtime: Any,
    *,
    split: str,
    metric: str,
    limit: int | None = None,
) -> Summary | None:
    """Each client's score (0-100) on its own `split`; None where no client has that split.

    Args:
        limit: at most this many examples per client.
    """
    asked = {name: client for name, client in clients.items() if client.queries.get(split)}
    if not asked:
        return None
    outcomes = runtime.run({name: _score(personal, client, split, metric, limit) for name, client in asked.items()})
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return summarize(metric, outcomes)


def check_options(client: Site) -> None:
    """Refuse data without options for option_accuracy, before anything is trained.

    Raises:
        UserError: an example has no option that equals its answer.
    """
    for split, queries in client.queries.items():
        for number, query in enumerate(queries):
            if query.correct < 0:
                raise UserError(
                    f"client {client.id}: {split} example {number} has no option that equals its answer, so there is "
                    "no option_accuracy; use eval.metric=exact_match, or name the column in task.columns.options"
                )


async def _score(personal: Personal, client: Site, split: str, metric: str, limit: int | None) -> float:
    return await score_split(client, await personal(client), split, metric, limit)


async def score_split(
    client: Site, theta: State, split: str, metric: str | None = None, limit: int | None = None
) -> float:
    """A client's score (0-100) on its own `split` under `theta`; the metric is the run's, unless one is given."""
    metric = metric or client.metric
    queries = client.queries[split][:limit]
    if metric == "accuracy":
        logits = await client.logits(theta, queries)
        return score(metric, logits.argmax(-1).tolist(), [picture.label for picture in queries])
    if metric != "option_accuracy":
        texts = await client.generate(theta, [query.prompt for query in queries])
        return score(metric, texts, [query.answers for query in queries])
    likelihoods = await client.option_scores(theta, queries)
    return score(metric, likelihoods, [query.correct for query in queries])
