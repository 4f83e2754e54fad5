"""Preferences as the fused loops see them: pairs of answers, or answers that are desirable or not.

Shape letters: N examples, S answers of each that train (2 of pairs, else 1), n target tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from llm_fed.basics.errors import UserError
from llm_fed.engine.examples import TEXT, Examples
from llm_fed.engine.packing import MicroBatch, collate
from llm_fed.method.losses import divergence
from llm_fed.method.objectives import Likelihoods, preference_losses
from llm_fed.models.joined import full
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks.common import AnswerPair, Encoded, Judged

Compared = TypeVar("Compared", bound=AnswerPair | Judged)


@dataclass(frozen=True)
class PreferenceBatch:
    """Examples side by side: the S answers of each are rows of `texts`, one behind the other."""

    texts: MicroBatch
    reference: Tensor  # (N, S) float64
    desirable: Tensor  # (N,) bool
    drift: Tensor  # (N,) float64: z of KTO
    rows: Tensor  # (N,) 0, 1, ...: an example has one loss

    @property
    def labels(self) -> Tensor:
        """(n,) the target tokens."""
        return self.texts.labels


@dataclass(frozen=True)
class Preferences(Examples[Compared, PreferenceBatch], Generic[Compared]):
    """Examples that each have one loss, and as many rows of a batch as they have answers that train."""

    objective: ObjectiveConfig

    single: ClassVar[bool] = False
    replaceable: ClassVar[bool] = False

    @abstractmethod
    def texts(self, example: Compared) -> Sequence[Encoded]:
        """The answers that train, each with the prompt."""

    def sizes(self, example: Compared) -> Sequence[int]:
        return [len(text.input_ids) for text in self.texts(example)]

    def length(self, example: Compared) -> int:
        """All rows as long as the longest: what is padded to it costs as much."""
        return self.each * max(self.sizes(example))

    def num_targets(self, examples: Sequence[Compared]) -> int:
        return len(examples)

    def collate(self, examples: Sequence[Compared]) -> PreferenceBatch:
        number = len(examples)
        return PreferenceBatch(
            texts=collate([text for example in examples for text in self.texts(example)]),
            reference=torch.tensor([example.reference[: self.each] for example in examples], dtype=torch.float64),
            desirable=torch.tensor([example.desirable for example in examples]),
            drift=torch.zeros(number, dtype=torch.float64),
            rows=torch.arange(number),
        )

    def logits(self, model: nn.Module, batch: PreferenceBatch, *, all_rows: bool = False) -> Tensor:
        return full(TEXT.predictions(model, batch.texts, all_rows=all_rows))

    def losses(
        self, model: nn.Module, batch: PreferenceBatch, *, all_rows: bool = False, wanted: Tensor | None = None
    ) -> Tensor:
        if wanted is None:
            return self._losses(TEXT.token_losses(model, batch.texts, all_rows=all_rows), batch)
        return super().losses(model, batch, all_rows=all_rows, wanted=wanted)

    def losses_of(self, logits: Tensor, batch: PreferenceBatch) -> Tensor:
        """(N,): see `objectives`."""
        return self._losses(cross_entropy(logits, batch.labels.to(logits.device), reduction="none"), batch)

    def _losses(self, tokens: Tensor, batch: PreferenceBatch) -> Tensor:
        """(N,) of the losses (n,) of target tokens."""
        of = self._likelihoods(-tokens, batch)
        return preference_losses(self.objective, of, batch.drift.to(of.logps))

    def divergences(self, logits: Tensor, batch: PreferenceBatch, wanted: Tensor) -> Tensor:
        """(N,): the mean over the tokens of an example's answers."""
        of = self._likelihoods(divergence(logits, wanted), batch)
        return of.logps.sum(1) / of.counts.sum(1)

    def drawn(self, logits: Tensor, batch: PreferenceBatch, generators: Sequence[torch.Generator]) -> PreferenceBatch:
        raise UserError(
            f"fisher=sampled draws labels from the model's probabilities, and examples of objective.name="
            f"{self.objective.name} have none; choose another setting of fisher"
        )

    def _likelihoods(self, tokens: Tensor, batch: PreferenceBatch) -> Likelihoods:
        """Of the log-likelihoods (n,) of target tokens."""
        rows, number = batch.texts.rows.to(tokens.device), len(batch.rows) * self.each
        logps, counts = (
            tokens.new_zeros(number).index_add(0, rows, values).view(-1, self.each)
            for values in (tokens, torch.ones_like(tokens))
        )
        return Likelihoods(logps, counts, batch.reference.to(logps), batch.desirable.to(logps.device))


@dataclass(frozen=True)
class Pairs(Preferences[AnswerPair]):
    """Pairs of answers; each is two rows of a batch."""

    each: ClassVar[int] = 2

    def texts(self, example: AnswerPair) -> Sequence[Encoded]:
        return (example.chosen, example.rejected)


@dataclass(frozen=True)
class JudgedAnswers(Preferences[Judged]):
    """Single answers; each is one row of a batch."""

    drifts: ClassVar[bool] = True

    def texts(self, example: Judged) -> Sequence[Encoded]:
        return (example.text,)


def examples_of(objective: ObjectiveConfig) -> Examples:
    """What language models train on with this loss on preferences."""
    return JudgedAnswers(objective) if objective.name == "kto" else Pairs(objective)
