"""How often a model prefers what people prefer, and by how much: against the frozen base, whatever it was trained with,
so that methods and losses can be compared.

An answer's reward is beta log(pi / pi_base); of ORPO and SimPO, which know no reference, beta times the mean
log-likelihood of its tokens (`method.objectives`). The accuracy is the share of pairs whose chosen answer has the
higher reward, where equal rewards count half: of the base itself it is 50. The margin is the mean difference of the two
rewards. Of single answers (KTO) those count that are desirable and have a reward above 0, or are not and have one
below; the margin is their mean reward with this sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from llm_fed.basics.errors import UserError
from llm_fed.method import State
from llm_fed.method.objectives import Likelihoods, preference_losses, rewards
from llm_fed.method.requests import Query
from llm_fed.method.site import Data, Site
from llm_fed.tasks.common import AnswerPair, Example

TIE = 1e-5  # of log-likelihoods that are this close, as a share of their size: what float32 rounds off


class Preferences(NamedTuple):
    """Of a client's examples."""

    accuracy: float  # 0-100
    margin: float
    loss: float  # by the run's objective; of sft by dpo's
    examples: tuple[float, ...] = ()  # the accuracy of each, 0-100


async def preferences(client: Site, theta: State, queries: Sequence[Query]) -> Preferences | None:
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
    least = (
        objective.strength * TIE * logps.abs().sum(1) / (counts.sum(1) if objective.name in ("orpo", "simpo") else 1)
    )
    right = torch.where(signed.abs() <= least, 0.5, (signed > 0).double())
    losses = preference_losses(objective, of)
    examples = tuple((100 * right).tolist())
    return Preferences(100 * float(right.mean()), float(signed.mean()), float(losses.mean()), examples)


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
    known, asked = ([_longer(example) for example in examples if example.rejected] for examples in (train, test))
    if not known or not asked:
        return None
    longer = fmean(known) >= 0.5
    return ("longer answer", 100 * fmean(asked)) if longer else ("shorter answer", 100 * (1 - fmean(asked)))


def _longer(example: Example) -> float:
    """1 where the chosen answer is the longer one in letters, 0 where the other is, 0.5 for equal ones."""
    one, other = len(example.answers[0]), len(example.rejected[-1].content)
    return 0.5 if one == other else float(one > other)
