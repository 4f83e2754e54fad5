"""Examples to tokens, as the task's settings say; what is too long is left out and counted, or cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from llm_fed.config import TaskConfig
from llm_fed.errors import UserError
from llm_fed.requests import Query
from llm_fed.tasks.common import Encoded, Example, Template, encode_continuation, encode_prompt, fitting
from llm_fed.tasks.conversations import encoded


class Encoder:
    """Encodes the examples of all clients of a task.

    Args:
        template: instead of the one that `task.template` names.

    Attributes:
        skipped: how many examples of each split were longer than `task.max_length` tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, task: TaskConfig, template: Template | None = None):
        self.tokenizer, self.task = tokenizer, task
        self.template = template or task.template
        self.skipped: Counter[str] = Counter()
        self._prompt = partial(encode_prompt, tokenizer=tokenizer, template=self.template)

    def training(self, client: str, split: str, examples: Sequence[Example], required: bool = True) -> list[Encoded]:
        """What training sees: prompt and response together.

        Raises:
            UserError: there are examples, at least one is `required`, and none fits.
        """
        encoded = [self._encode(example) for example in examples]
        fitting = [item for item in encoded if item is not None]
        if required:
            self._count(client, split, len(examples), len(fitting))
        return fitting

    def queries(self, client: str, split: str, examples: Sequence[Example], limit: int | None = None) -> list[Query]:
        """What evaluation asks: of the examples whose prompt fits, the first `limit`.

        Raises:
            UserError: there are examples, and none fits.
        """
        fitting: list[Query] = []
        seen = 0
        for example in examples:
            if limit is not None and len(fitting) == limit:
                break
            seen += 1
            whole = self._prompt(example.prompt)
            prompt = whole[-self.task.max_length :] if self.task.too_long == "cut-start" else whole
            if len(prompt) <= self.task.max_length:
                fitting.append(self._query(example, prompt, len(whole)))
        self._count(client, split, seen, len(fitting))
        return fitting

    def note(self) -> str:
        """What was left out, in words; empty where nothing was."""
        counts = " and ".join(f"{count} {split}" for split, count in self.skipped.items())
        return f"{counts} examples are longer than {self.task.max_length} tokens and are left out" if counts else ""

    def _count(self, client: str, split: str, seen: int, fitting: int) -> None:
        if seen and not fitting:
            raise UserError(
                f"client {client}: none of its {seen} {split} examples fits into task.max_length="
                f"{self.task.max_length} tokens; raise it, or leave the client out"
            )
        if seen > fitting:
            self.skipped[split] += seen - fitting

    def _query(self, example: Example, prompt: list[int], whole: int) -> Query:
        """
        Args:
            prompt: what is asked.
            whole: how many tokens the prompt has that was not cut.
        """
        options = tuple(
            encode_continuation(example.prompt, option, self.tokenizer, template=self.template).input_ids[whole:]
            for option in example.options
        )
        right = [index for index, option in enumerate(example.options) if option in example.answers]
        known = self._encode(example) if example.answers else None
        return Query(prompt, example.answers, options, right[0] if right else -1, known)

    def _encode(self, example: Example) -> Encoded | None:
        return fitting(
            encoded(example, self.tokenizer, self.template), self.task.max_length, self.task.loss_on, self.task.too_long
        )
