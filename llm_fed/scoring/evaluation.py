"""Scores every client under its own personal model, all clients' rows in the same batches."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from llm_fed.basics.errors import UserError
from llm_fed.basics.names import rounded
from llm_fed.method import State
from llm_fed.method.objectives import Likelihoods, preference_losses, rewards
from llm_fed.method.requests import Query, Runtime, succeeded
from llm_fed.method.site import Data, Site
from llm_fed.scoring.metrics import Prediction, Reference
from llm_fed.scoring.scores import (
    ABILITY,
    CLASSIFIED,
    OF_ANSWERS,
    PREFERENCE,
    Summary,
    find,
    likelihood,
    score,
    score_each,
    summarize,
    without_credit,
)
from llm_fed.tasks.common import AnswerPair, Example, labels_of

Personalize = Callable[[Site], Coroutine[Any, Any, State]]  # makes a client's personal model, as `Method.personalize`
Personal = Mapping[str, State] | Personalize  # the personal models by client, or what makes them
TIE = 1e-5  # of log-likelihoods that are this close, as a share of their size: what float32 rounds off


@dataclass(frozen=True)
class Measured:
    """What a model is worth on a client's examples."""

    score: float  # 0-100; NaN where the metric is not defined
    loss: float | None = None  # mean per target token or picture; None where there is none
    examples: tuple[float, ...] = ()  # the score of each example, 0-100, where it was requested
    beside: Mapping[str, float] = field(default_factory=dict)  # what was measured beside, by name
    predictions: Sequence[Prediction] = ()  # of a language model: texts, or log-likelihoods of options


def evaluate(
    personal: Personal,
    clients: Mapping[str, Site],
    runtime: Runtime,
    *,
    split: str,
    metric: str,
    limit: int | None = None,
    each: bool = False,
) -> Summary | None:
    """Each client's score (0-100) and loss on its own `split`, of `limit` examples at most; None where no client has
    that split, or none a score. A client that has no example of it is named as unscored, and so is one for whose
    examples the metric is not defined (NaN). With `each` the summary has the score of each example, too, where the
    metric is a mean over examples."""
    requested = {name: client for name, client in clients.items() if client.data.queries.get(split)}
    if not requested:
        return None
    work = {name: measure(personal, client, split, metric, limit, each) for name, client in requested.items()}
    for name, client in requested.items():
        if each and split == "test" and client.data.ability:
            work[name] = _with_ability(personal, client, work[name])
    outcomes = succeeded(runtime.run(work))
    undefined = [name for name, its in outcomes.items() if math.isnan(its.score)]
    outcomes = {name: its for name, its in outcomes.items() if name not in undefined}
    if not outcomes:
        return None
    losses = {name: rounded(its.loss) for name, its in outcomes.items() if its.loss is not None}
    scores = {name: its.score for name, its in outcomes.items()}
    beside = {name: its.beside for name, its in outcomes.items()}
    summary = summarize(metric, scores, losses, [name for name in clients if name not in scores], beside)
    examples = {name: its.examples for name, its in outcomes.items() if its.examples}
    predictions = {name: its.predictions for name, its in outcomes.items() if its.predictions}
    return replace(summary, undefined=tuple(undefined), examples=examples, predictions=predictions)


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
    personal: Personal, client: Site, split: str, metric: str, limit: int | None, each: bool = False, loss: bool = True
) -> Measured:
    """One client's score and loss, both of the same examples under the same model; with `each` the score of each
    example, too, and without `loss` no loss where it is work of its own. Of preferences also the accuracy and the
    margin, beside any metric of texts, and how good the answers are beside preference_accuracy."""
    theta = personal[client.id] if isinstance(personal, Mapping) else await personal(client)
    queries = client.data.queries[split][:limit]
    read = find(metric, labelled=client.data.num_labels > 0).scores
    predictions: Sequence[Prediction]
    references: Sequence[Reference]
    if read in CLASSIFIED:
        predictions, mean = _classified(read, await client.logits(theta, queries), labels_of(queries))
        references = [example.label for example in queries]
        measured = Measured(score(metric, predictions, references), mean)
    elif read == "loss":
        value = await client.loss_of_answers(theta, queries)
        if value is None:
            raise UserError(f"client {client.id}: none of {len(queries)} examples fits into task.max_length; raise it")
        return Measured(likelihood(value), value)
    elif read == "preferences":
        return await _preferred(client, theta, queries, split)
    else:
        compared = await preferences(client, theta, queries) if any(query.pair for query in queries) else None
        predictions = await predict(client, theta, queries, metric)
        references = [query.correct if read == "options" else query.answers for query in queries]
        value = compared.loss if compared and client.objective.preferences else None
        if value is None and loss:
            value = await client.loss_of_answers(theta, queries)
        beside = {PREFERENCE: compared.accuracy, "margin": compared.margin} if compared else {}
        measured = Measured(score(metric, predictions, references), value, beside=beside, predictions=predictions)
    return replace(measured, examples=tuple(score_each(metric, predictions, references))) if each else measured


async def _with_ability(personal: Personal, client: Site, measuring: Awaitable[Measured]) -> Measured:
    """Also what the model is worth on the fixed text of `eval.ability`, where there is one."""
    measured = await measuring
    theta = personal[client.id] if isinstance(personal, Mapping) else await personal(client)
    loss = await client.loss_of_answers(theta, client.data.ability)
    return measured if loss is None else replace(measured, beside={**measured.beside, ABILITY: likelihood(loss)})


async def _preferred(client: Site, theta: State, queries: Sequence[Query], split: str) -> Measured:
    """By preference_accuracy; on the test split also how good the answers are."""
    known = await preferences(client, theta, queries)
    if known is None:
        raise UserError(f"client {client.id} has no pair that fits into task.max_length; raise it")
    beside, predictions = {"margin": known.margin}, list[str]()
    if split == "test":
        predictions = await client.generate(theta, [query.prompt for query in queries])
        beside[OF_ANSWERS] = score(OF_ANSWERS, predictions, [query.answers for query in queries])
    return Measured(known.accuracy, known.loss, known.examples, beside, predictions)


async def score_split(client: Site, theta: State, split: str) -> float:
    """A client's score (0-100) on its own `split` under `theta`, by the run's metric; NaN where it is not defined."""
    return (await measure({client.id: theta}, client, split, client.data.metric, None, loss=False)).score


async def predict(client: Site, theta: State, queries: Sequence[Query], metric: str) -> Sequence[Prediction]:
    """What a model says to queries of text, as the metric reads it: texts, or log-likelihoods of options."""
    if find(metric).scores == "options":
        return await client.option_scores(theta, queries)
    return await client.generate(theta, [query.prompt for query in queries])


def _classified(read: str, logits: Tensor, right: Tensor) -> tuple[list[float], float]:
    """What a classifier says, labels or numbers, and its mean loss, as in training."""
    if read == "values":
        said = logits.squeeze(-1)
        return said.tolist(), float(mse_loss(said, right.to(logits)))
    return logits.argmax(-1).tolist(), float(cross_entropy(logits, right))


class PreferenceScores(NamedTuple):
    """Of a client's examples."""

    accuracy: float  # 0-100
    margin: float
    loss: float  # by the run's objective; of sft by dpo's
    examples: tuple[float, ...] = ()  # the accuracy of each, 0-100


async def preferences(client: Site, theta: State, queries: Sequence[Query]) -> PreferenceScores | None:
    """What a model prefers, of the queries that have a pair; None where none has."""
    pairs = [query.pair for query in queries if query.pair is not None]
    if not pairs:
        return None
    own, base = [await client.log_likelihoods(state, pairs) for state in (theta, None)]
    each = 2 if isinstance(pairs[0], AnswerPair) else 1
    logps, reference = (torch.tensor([one[:each] for one in found], dtype=torch.float64) for found in (own, base))
    counts = torch.tensor([[sum(text.target[1:]) for text in pair.texts[:each]] for pair in pairs]).double()
    of = Likelihoods(logps, counts, reference, torch.tensor([pair.desirable for pair in pairs]))
    objective, found = client.objective, rewards(client.objective, of)
    signed = found[:, 0] - found[:, 1] if each == 2 else torch.where(of.desirable, found[:, 0], -found[:, 0])
    per = counts.sum(1) if objective.name in ("orpo", "simpo") else 1
    least = objective.strength * TIE * logps.abs().sum(1) / per
    right = torch.where(signed.abs() <= least, 0.5, (signed > 0).double())
    losses = preference_losses(objective, of)
    examples = tuple((100 * right).tolist())
    return PreferenceScores(100 * float(right.mean()), float(signed.mean()), float(losses.mean()), examples)


def check_pairs(client: str, data: Data) -> None:
    """UserError, before training, for data without preferences for preference_accuracy."""
    for split, queries in data.queries.items():
        if len(queries) and all(query.pair is None for query in queries):
            raise UserError(
                f"client {client}: no {split} example has a rejected answer or a label that fits into task.max_length, "
                "so there is no preference_accuracy; add columns chosen and rejected, raise task.max_length, or set "
                "eval.metric=rouge1"
            )


def by_length(train: Sequence[Example], test: Sequence[Example]) -> tuple[str, float] | None:
    """The better of two rules that need no model, the longer or the shorter answer, by the training pairs, and its
    score on the test pairs, 0-100; None without pairs."""
    known, requested = ([_longer(example) for example in examples if example.rejected] for examples in (train, test))
    if not known or not requested:
        return None
    longer = fmean(known) >= 0.5
    return ("longer answer", 100 * fmean(requested)) if longer else ("shorter answer", 100 * (1 - fmean(requested)))


def _longer(example: Example) -> float:
    """1 where the chosen answer is the longer one in letters, 0 where the other is, 0.5 for equal ones."""
    one, other = len(example.answers[0]), len(example.rejected[-1].content)
    return 0.5 if one == other else float(one > other)


def notes_on_scores(sites: Collection[Site], metric: str) -> list[str]:
    """A sentence for each split that has examples which score 0 whatever is answered. UserError for a reference that
    the metric cannot read."""
    notes = []
    for split in dict.fromkeys(split for site in sites for split in site.data.queries):
        answers, clients = [], []
        for site in sites if find(metric).scores == "texts" else ():
            queries = site.data.queries.get(split, ())
            for each in getattr(queries, "examples", queries):  # whose tokens are not needed, see `Encodings`
                if isinstance(each, Example | Query):
                    answers.append(each.answers)
                    clients.append(site.id)
        if worthless := without_credit(metric, answers):
            first = worthless[0]
            notes.append(
                f"{len(worthless)} of {len(answers)} {split} examples score 0 under {metric} whatever is answered, "
                f"since {metric} finds too little in their references to compare, e.g. {answers[first][0][:60]!r} of "
                f"client {clients[first]}; use exact_match (eval.metric=exact_match), which compares whole texts"
            )
    return notes


def notes_on_length(sites: Collection[Site], most: int) -> dict[str, str]:
    """By split, a note where right answers are longer than the `most` tokens of an answer (`Data.cut`)."""
    notes = {}
    for split in dict.fromkeys(split for site in sites for split in site.data.cut):
        lengths = [length for site in sites for length in site.data.cut.get(split, ())]
        number = sum(len(site.data.queries[split]) for site in sites if site.data.queries.get(split))
        longest = max(lengths)
        if longest > most:
            how = f"are longer than eval.max_new_tokens={most} tokens (the longest has {longest})"
            what = f"set eval.max_new_tokens={longest}"
        else:
            how, what = "do not fit into the base's context after their prompts", "lower task.max_length"
        notes[split] = (
            f"{len(lengths)} of {number} {split} references {how}, so that even a perfect answer is cut and scores "
            f"less; {what}"
        )
    return notes
