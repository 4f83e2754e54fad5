"""Labelled texts as the engine sees them, and how they become tokens.

Shape letters: N texts, T tokens, C classes, H features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from llm_fed.basics.errors import UserError, listed
from llm_fed.kinds.kind import Labelled, in_scored_order
from llm_fed.method.site import Data
from llm_fed.models.joined import Answer, heard
from llm_fed.settings.config import Config
from llm_fed.tasks.common import ClientData, Example
from llm_fed.tasks.labelled import number, place_of

if TYPE_CHECKING:
    from llm_fed.kinds.sequences import Sequences


@dataclass(frozen=True)
class Sentence:
    """A text, or a pair of texts, as tokens (T), and its label: the index of a class, or a number."""

    input_ids: list[int]
    types: list[int]  # (T) 0, and 1 in the second text of a pair, where the base tells them apart; else empty
    label: float  # an int of a class


@dataclass(frozen=True)
class Sheet:
    """Texts side by side, padded on the right."""

    input_ids: Tensor  # (N, T)
    mask: Tensor  # (N, T) 1 where a token is, and 0 behind it
    types: Tensor  # (N, T), or (0,) where the base has none
    labels: Tensor  # (N,) int64, or float64 of numbers

    @property
    def rows(self) -> Tensor:
        return torch.arange(len(self.labels), device=self.labels.device)


@dataclass(frozen=True, kw_only=True)
class Sentences(Labelled):
    """Texts, each with one label."""

    base: Sequences

    def length(self, example: Sentence) -> int:
        return len(example.input_ids)

    def collate(self, examples: Sequence[Sentence]) -> Sheet:
        ids = [torch.tensor(example.input_ids) for example in examples]
        mask = pad_sequence([torch.ones_like(each) for each in ids], batch_first=True)
        padded = pad_sequence(ids, batch_first=True, padding_value=self.base.tokenizer.pad_token_id)
        types = torch.zeros(0, dtype=torch.int64)
        if self.base.has_types:
            types = pad_sequence([torch.tensor(example.types) for example in examples], batch_first=True)
        return Sheet(padded, mask, types, self._labels(examples))

    def _labels(self, examples: Sequence[Sentence]) -> Tensor:
        return torch.tensor([example.label for example in examples])

    def answer(self, model: nn.Module, batch: Sheet) -> Answer:
        inputs = {"input_ids": batch.input_ids}
        if not self.base.is_causal:  # else a window of attention that holds nothing but padding would give NaN
            inputs["attention_mask"] = batch.mask
        if batch.types.numel():
            inputs["token_type_ids"] = batch.types
        answer = heard(model, self.base.head, **inputs)
        if answer.features.dim() == 2:
            return answer
        # The head of a decoder reads every token, and transformers keeps what it says of the last that is no padding.
        indices = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
        last = (indices * (batch.input_ids != self.base.tokenizer.pad_token_id)).argmax(-1)
        return replace(answer, features=answer.features[torch.arange(len(last), device=last.device), last])


@dataclass(frozen=True, kw_only=True)
class Numbers(Sentences):
    """Texts, each with a number that the model's one logit predicts; the loss is the squared error."""

    def _labels(self, examples: Sequence[Sentence]) -> Tensor:
        return torch.tensor([example.label for example in examples], dtype=torch.float64)

    def losses_of(self, logits: Tensor, batch: Sheet) -> Tensor:
        return self.divergences(logits, batch, batch.labels[:, None])

    def divergences(self, logits: Tensor, batch: Sheet, wanted: Tensor) -> Tensor:
        return (logits - wanted.to(logits)).square().sum(1)

    def drawn(self, logits: Tensor, batch: Sheet, generators: Sequence[torch.Generator]) -> Sheet:
        """The batch with numbers of which the squared error is the negative log-likelihood: Gaussian, with variance
        1/2."""
        noise = torch.cat([torch.randn(1, generator=each, dtype=torch.float64) for each in generators])
        return replace(batch, labels=logits[:, 0].double() + (0.5**0.5) * noise.to(logits.device))


class SentenceEncoding:
    """Examples of a task as `Sentence`s; those that are too long are left out and counted, or cut. `labels`: the
    classes of the data, by which the server of another task numbers its own. `most`: tokens of a text at most."""

    def __init__(self, base: Sequences, config: Config, server_labels: Sequence[str]):
        self._base, self._config, self._server_labels = base, config, server_labels
        limit, requested = base.longest, config.task.max_length
        self.most = requested if limit is None else min(requested, limit)
        self._skipped: Counter[str] = Counter()

    def data(self, id: str, given: ClientData, data: Data) -> Data:
        names = self._server_labels if id == "server" and self._server_labels else self._base.labels
        before = self._skipped.copy()
        none_fits: list[str] = []

        def encoded(split: str, examples: Sequence[Example], count: bool = True) -> list[Sentence]:
            found = self._base.sentences(examples, names, where=f"client {id}, {split}")
            fitting = [kept for sentence in found if (kept := self._fitting(sentence)) is not None]
            if count:
                self._skipped[split] += len(found) - len(fitting)
                if found and not fitting:
                    none_fits.append(
                        f"client {id}: none of its {len(found)} {split} examples fits into {self.most} tokens, the "
                        "least of task.max_length and of what the base reads; set task.too_long=cut-end, or raise it"
                    )
            return fitting

        queries = {
            split: encoded(split, in_scored_order(own, own, split, self._config))
            for split, own in (("validation", given.validation), ("test", given.test))
        }
        return replace(
            data, train=encoded("training", given.train), held_out=encoded("validation", given.validation, count=False),
            queries=queries, left_out=self._skipped - before, none_fits=tuple(none_fits),
        )  # fmt: skip

    def _fitting(self, sentence: Sentence) -> Sentence | None:
        if len(sentence.input_ids) <= self.most:
            return sentence
        too_long = self._config.task.too_long
        return None if too_long == "skip" else self._base.cut(sentence, self.most, start=too_long == "cut-start")

    def note(self) -> str:
        counts = " and ".join(f"{count} {split}" for split, count in self._skipped.items() if count)
        said = [self._base.remark] if self._base.remark else []
        if counts:
            limit = "" if self.most == self._config.task.max_length else ", all that the base reads,"
            said.append(
                f"{counts} examples are longer than {self.most} tokens{limit} and are left out; task.too_long=cut-end "
                "cuts them"
            )
        return "; ".join(said)


def label_of(example: Example, names: Sequence[str], numbers: bool, where: str) -> float:
    """The index of an example's class among `names`, or its number. UserError: it is none of them."""
    text = example.answers[0]
    found = number(text) if numbers else place_of(text, names)
    if found is None:
        wanted = "no number" if numbers else f"none of {listed(names)}"
        raise UserError(
            f"{where}: the label {text!r} is {wanted}; correct the example, or name all labels in task.labels"
        )
    return found
