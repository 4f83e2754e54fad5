"""Use one client's personal model: it answers prompts, at once or as a stream, or classifies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from llm_fed.basics import turns
from llm_fed.basics.rng import generator
from llm_fed.export.peft_folders import AdapterWarning
from llm_fed.kinds import Kind
from llm_fed.models.architectures import usual_targets
from llm_fed.models.lora import Lora
from llm_fed.state import State
from llm_fed.tasks.common import Template
from llm_fed.tasks.control import THINK

Conversation = Sequence[Mapping[str, str]]  # {"role", "content"} of each message
MOST = 128  # tokens of an answer, where nobody says


@dataclass(frozen=True)
class Personal:
    """A base with one client's adapter, or with its experts and the gate that weighs them."""

    base: Any  # a `Kind`
    state: State
    structure: Lora

    @turns.taken()
    def generate(
        self,
        prompts: Sequence[str],
        *,
        template: str | None = None,
        max_new_tokens: int | None = None,
        batch_size: int = 32,
    ) -> list[str]:
        """Greedy answers, one per prompt.

        Args:
            template: the prompt template's name (default: the adapter's, or, with a warning, alpaca-short).
            max_new_tokens: the longest answer in tokens (default: the adapter's, or 128).

        Raises:
            UserError: it is an image model, the template is unknown, or a prompt is longer than the base's context.
        """
        tokens = self._tokens(prompts, template)
        return self.base.write(self.structure, self.state, tokens, self._most(max_new_tokens), batch_size)

    def reply(
        self,
        prompt: str | Conversation,
        *,
        template: str | Template | None = None,
        max_new_tokens: int | None = None,
        sampling: Any = None,
    ) -> Iterator[str]:
        """Stream one answer in pieces, without reasoning; joined, those of a greedy one are what `generate` returns.

        Args:
            prompt: a text, or a conversation whose last message is to be answered.
            template: the template or its name (default: as in `generate`).
            sampling: an `engine.continuous.Sampling` (default: the answer is greedy, as in scores).

        Raises:
            UserError: as `generate`, before the first piece.
        """
        (tokens,) = self._tokens([prompt], template)
        ids: list[int] = []
        shown, text = "", ""
        stream = self.base.stream(self.structure, self.state, tokens, self._most(max_new_tokens), sampling)
        while (token := _next(stream)) is not None:
            ids.append(token)
            text = self.base.answer_text(tokens, ids)
            if THINK.startswith(text):
                continue  # it may be the beginning of reasoning
            whole = text.rstrip("\ufffd")  # of a character that has several tokens, some may still be missing
            if whole.startswith(shown) and len(whole) > len(shown):
                yield whole[len(shown) :]
                shown = whole
        if len(text) > len(shown):
            yield text[len(shown) :]

    @turns.taken()
    def classify(self, given: Any) -> Tensor:
        """The numbers (N,) of the labels of images (N, 1 or 3, height, width) uint8, or of texts or pairs of texts,
        whose names are in `base.labels`; or the numbers that are predicted. UserError: it is a language model."""
        return self.base.classify(self.structure, self.state, given)

    def _tokens(self, prompts: Sequence[str | Conversation], template: str | Template | None) -> list[list[int]]:
        tokens = self.base.tokens(prompts, template)
        if template is None and self.base.prompt is None:
            warnings.warn(
                "the folder does not say with which prompt template it was trained, so alpaca-short is used; give "
                "template=... if it was another",
                AdapterWarning,
                stacklevel=3,
            )
        return tokens

    def _most(self, requested: int | None) -> int:
        said = self.base.prompt
        return requested if requested is not None else said.max_new_tokens if said else MOST


@turns.taken()
def _next(tokens: Iterator[int]) -> int | None:
    return next(tokens, None)


def alone(base: Kind) -> Personal:
    """A language model without any adapter: one whose B is zero, so that it adds nothing."""
    structure = Lora(rank=1, alpha=1, dropout=0.0, target_modules=usual_targets(base.model) or "all-linear")
    return Personal(base, base.draw(structure, generator(0)), structure)
