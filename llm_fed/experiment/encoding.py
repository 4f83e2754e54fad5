"""Examples to tokens, as the task's settings say; what is too long is left out and counted, or cut.

How long each example is, all clients' are asked at the start, many at once; the tokens themselves are made when a
client works.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, overload

from transformers import PreTrainedTokenizerBase

from llm_fed.config import TaskConfig
from llm_fed.errors import UserError
from llm_fed.requests import Query
from llm_fed.tasks.common import (
    Encoded,
    Example,
    Template,
    encode_continuation,
    encode_prompt,
    fitting,
    select,
    template_of,
)
from llm_fed.tasks.conversations import encoded

BATCH = 2048  # examples whose lengths are found at once
MOST = 2**24  # tokens that are kept, of the clients that worked last; they take some 0.7 GiB
Item = TypeVar("Item", Encoded, Query)


class NoneFits(UserError):
    """A client has examples, and all of them are too long."""


class Length(NamedTuple):
    """Tokens of an example."""

    prompt: int
    whole: int  # with the response


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
        self._kept = _Kept()

    def lengths(self, splits: Iterable[Sequence[Example]]) -> Iterator[list[Length]]:
        """Of each split, in turn, how long its examples are."""
        remaining = iter(splits)
        while group := list(_up_to(BATCH, remaining)):
            found = iter(self._lengths([example for examples in group for example in examples]))
            yield from (list(islice(found, len(examples))) for examples in group)

    def training(
        self,
        client: str,
        split: str,
        examples: Sequence[Example],
        required: bool = True,
        lengths: Sequence[Length] | None = None,
    ) -> Sequence[Encoded]:
        """What training sees: prompt and response together.

        Args:
            lengths: of the examples, where they are known.

        Raises:
            NoneFits: there are examples, at least one is `required`, and none fits.
        """
        lengths = self._lengths(examples) if lengths is None else lengths
        places = [
            place
            for place, length in enumerate(lengths)
            if length.whole <= self.task.max_length
            or (self.task.too_long != "skip" and self._encode(examples[place]) is not None)
        ]
        if required:
            self._count(client, split, len(examples), len(places))
        return Encodings(select(examples, places), self._encode_fitting, self._kept)

    def queries(
        self,
        client: str,
        split: str,
        examples: Sequence[Example],
        limit: int | None = None,
        lengths: Sequence[Length] | None = None,
    ) -> Sequence[Query]:
        """What evaluation asks: of the examples whose prompt fits, the first `limit`.

        Args:
            lengths: of the examples, where they are known.

        Raises:
            NoneFits: there are examples, and none fits.
        """
        lengths = self._lengths(examples) if lengths is None else lengths
        cut, most = self.task.too_long == "cut-start", self.task.max_length
        places: list[int] = []
        seen = 0
        for place, length in enumerate(lengths):
            if limit is not None and len(places) == limit:
                break
            seen += 1
            if cut or length.prompt <= most:
                places.append(place)
        self._count(client, split, seen, len(places))
        return Encodings(select(examples, places), self._query, self._kept)

    def note(self) -> str:
        """What was left out, in words; empty where nothing was."""
        counts = " and ".join(f"{count} {split}" for split, count in self.skipped.items())
        return f"{counts} examples are longer than {self.task.max_length} tokens and are left out" if counts else ""

    def _count(self, client: str, split: str, seen: int, fitting: int) -> None:
        if seen > fitting:
            self.skipped[split] += seen - fitting
        if seen and not fitting:
            raise NoneFits(
                f"client {client}: none of its {seen} {split} examples fits into task.max_length="
                f"{self.task.max_length} tokens; raise it, or leave the client out"
            )

    def _lengths(self, examples: Sequence[Example]) -> list[Length]:
        """Texts in a template of text all at once, which is ten times as fast as one by one; others one by one."""
        template = self.template if isinstance(self.template, Template) else template_of(self.template, self.tokenizer)
        texts = template.date is None and all(isinstance(example.prompt, str) for example in examples)
        if not examples:
            return []
        if not texts or self.tokenizer.eos_token_id is None:
            return [self._length(example) for example in examples]
        prompts = self.tokenizer([template.text.replace("{prompt}", str(example.prompt)) for example in examples])
        answers = self.tokenizer([_answer(example) for example in examples], add_special_tokens=False)
        return [
            Length(before := len(prompt) - (prompt[-1:] == [self.tokenizer.eos_token_id]), before + len(answer) + 1)
            for prompt, answer in zip(prompts.input_ids, answers.input_ids, strict=True)
        ]

    def _length(self, example: Example) -> Length:
        # First the whole: what is wrong with a conversation, it says best.
        whole = encoded(example, self.tokenizer, self.template).input_ids if example.answers else ()
        return Length(len(self._prompt(example.prompt)), len(whole))

    def _query(self, example: Example) -> Query:
        whole = self._prompt(example.prompt)
        prompt = whole[-self.task.max_length :] if self.task.too_long == "cut-start" else whole
        options = tuple(
            encode_continuation(example.prompt, option, self.tokenizer, template=self.template).input_ids[len(whole) :]
            for option in example.options
        )
        right = [index for index, option in enumerate(example.options) if option in example.answers]
        known = self._encode(example) if example.answers else None
        return Query(prompt, example.answers, options, right[0] if right else -1, known)

    def _encode(self, example: Example) -> Encoded | None:
        return fitting(
            encoded(example, self.tokenizer, self.template), self.task.max_length, self.task.loss_on, self.task.too_long
        )

    def _encode_fitting(self, example: Example) -> Encoded:
        found = self._encode(example)
        assert found is not None  # see `training`
        return found


class Encodings(Sequence[Item], Generic[Item]):
    """What an encoder makes of some examples, made when the first is looked at.

    Attributes:
        examples: of which it is made.
    """

    def __init__(self, examples: Sequence[Example], encode: Callable[[Example], Item], kept: _Kept):
        self.examples, self._kept = examples, kept
        self._encode: Callable[[Example], Item] = encode
        self.items: list[Item] | None = None  # see `_Kept`

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        items = self.items
        if items is None:
            self.items = items = [self._encode(example) for example in self.examples]
            self._kept.add(self, sum(map(_size, items)))
        return items[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self[:])


class _Kept:
    """The encodings that were made last, up to MOST tokens; those before them are forgotten, to be made again."""

    def __init__(self) -> None:
        self._made: deque[tuple[Encodings[Any], int]] = deque()
        self._tokens = 0

    def add(self, made: Encodings[Any], tokens: int) -> None:
        self._made.append((made, tokens))
        self._tokens += tokens
        while self._tokens > MOST and len(self._made) > 1:
            oldest, tokens = self._made.popleft()
            oldest.items = None
            self._tokens -= tokens


def _answer(example: Example) -> str:
    return example.answers[0] if example.answers else ""


def _size(item: Encoded | Query) -> int:
    if isinstance(item, Encoded):
        return len(item.input_ids)
    return len(item.prompt) + sum(map(len, item.options)) + (len(item.example.input_ids) if item.example else 0)


def _up_to(most: int, splits: Iterator[Sequence[Example]]) -> Iterator[Sequence[Example]]:
    """The next ones, until they have so many examples together."""
    count = 0
    for examples in splits:
        yield examples
        count += len(examples)
        if count >= most:
            return
