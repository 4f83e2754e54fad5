"""Examples to tokens, as the task's settings say; what is too long is left out and counted, or cut.

How long each example is, all clients' are asked at the start, many at once; the tokens themselves are made when a
client works.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, overload

from transformers import PreTrainedTokenizerBase

from llm_fed.basics.errors import UserError, one_line
from llm_fed.method.requests import Query
from llm_fed.models.loading import check_rows
from llm_fed.settings.config import TaskConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks import preferences
from llm_fed.tasks.chat import ChatTemplate
from llm_fed.tasks.common import AnswerPair, Encoded, Example, Judged, Template, fitting, select, text_of
from llm_fed.tasks.control import THINK, THOUGHT, answer_of, has_surrogates, read_as_text, reasoning, without_surrogates
from llm_fed.tasks.conversations import encoded
from llm_fed.tasks.templates import as_turns, encode_continuation, encode_prompt, filled, template_of

BATCH = 2048  # examples whose lengths are found at once
MOST = 2**24  # tokens that are kept, of the clients that worked last; they take some 0.7 GiB
Trained: TypeAlias = Encoded | AnswerPair | Judged
Item = TypeVar("Item")


class NoneFits(UserError):
    """A client has examples, and all of them are too long."""


class Length(NamedTuple):
    """Tokens of an example."""

    prompt: int
    whole: int  # with the response
    is_text: bool = False  # whether there is no prompt


class Odd(NamedTuple):
    """What is odd in an example."""

    plain: bool  # nothing: it is text in a template of text
    untrained: int = 0  # messages of the assistant that are no targets
    halves: bool = False  # of characters
    unanswered: bool = False  # whether its reply is reasoning alone
    spelled: tuple[str, ...] = ()  # the first control token that it spells

    def and_of(self, other: Odd) -> Odd:
        """What is odd in an example of which the other is the second answer."""
        halves, unanswered = self.halves or other.halves, self.unanswered or other.unanswered
        return Odd(self.plain, self.untrained + other.untrained, halves, unanswered, self.spelled or other.spelled)


class Encoder:
    """Encodes the examples of all clients of a task.

    Args:
        template: instead of the one that `task.template` names.
        rows: of the base's embedding, if they are known.
        room: how many tokens may be answered to a prompt of so many, where answers are texts.
        objective: which loss the examples are for.

    Attributes:
        skipped: how many examples of each split were longer than `task.max_length` tokens.

    Raises:
        UserError: there is no such template. Later: an example cannot fill it, or has a token without an embedding.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        task: TaskConfig,
        template: Template | None = None,
        rows: int | None = None,
        room: Callable[[int], int] | None = None,
        objective: ObjectiveConfig = ObjectiveConfig(),  # noqa: B008  frozen
    ):
        self.tokenizer, self.task, self.rows, self._room = tokenizer, task, rows, room
        self.objective = objective
        self.template = template or template_of(task.template, tokenizer)
        self.skipped: Counter[str] = Counter()
        self._filled = filled(self.template, tokenizer)
        self._kept = _Kept()
        self._halves = 0  # examples with halves of characters
        self._untrained = 0  # messages of the assistant that are no targets
        self._unanswered = 0  # examples whose reply is reasoning alone
        self._not_compared = 0  # examples that are asked, whose given answers are too long
        self._alike: Counter[bool] = Counter()  # clients whose answers are all desirable (True), or all not
        self._spelled: Counter[str] = Counter()  # examples by the first control token that they spell

    def lengths(self, splits: Iterable[Sequence[Example]]) -> Iterator[list[Length]]:
        """Of each split, in turn, how long its examples are."""
        remaining = iter(splits)
        while group := list(_up_to(BATCH, remaining)):
            for examples in group if self.objective.preferences else ():
                preferences.check(self.objective.name, examples)
            found = iter(self._lengths([example for examples in group for example in examples]))
            yield from (list(islice(found, len(examples))) for examples in group)

    def training(
        self,
        client: str,
        split: str,
        examples: Sequence[Example],
        required: bool = True,
        lengths: Sequence[Length] | None = None,
    ) -> Sequence[Trained]:
        """What training sees: prompt and response together.

        Args:
            lengths: of the examples, where they are known.

        Raises:
            NoneFits: there are examples, at least one is `required`, and none fits.
        """
        lengths = self._lengths(examples) if lengths is None else lengths
        indices = [
            index
            for index, length in enumerate(lengths)
            if length.whole <= self.task.max_length or (self.task.too_long != "skip" and self._is_left(examples[index]))
        ]
        if required:
            self._count(client, split, len(examples), len(indices))
        chosen, joined = select(examples, indices), self.objective.name == "kto"
        if joined and required and (alike := preferences.only_label(chosen)) is not None:
            self._alike[alike] += 1
        return Encodings(chosen, self._encode_fitting, self._kept, finish=self._beside_others if joined else None)

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
        indices: list[int] = []
        seen = 0
        for index, length in enumerate(lengths):
            if limit is not None and len(indices) == limit:
                break
            seen += 1
            needed = length.whole if length.is_text and self.task.too_long == "skip" else length.prompt
            if cut or needed <= most:
                indices.append(index)
        self._count(client, split, seen, len(indices))
        if self.objective.preferences and self.task.too_long == "skip":
            self._not_compared += sum(lengths[index].whole > most for index in indices)
        return Encodings(select(examples, indices), self._query, self._kept, [lengths[index] for index in indices])

    def cut(self, queries: Sequence[Query]) -> list[int]:
        """The tokens of the right answers to `queries`, of those that are longer than the model may answer.

        An example with several right answers counts with the shortest.
        """
        if self._room is None or not isinstance(queries, Encodings):
            return []
        found = []
        for example, length in zip(queries.examples, queries.lengths, strict=True):
            room = self._room(min(length.prompt, self.task.max_length))
            answer = length.whole - length.prompt - 1  # at most: one token ends it, or more
            if answer > room and example.answers:
                if len(example.answers) > 1 or isinstance(self._filled, ChatTemplate) or not length.prompt:
                    answer = min(map(len, self.tokenizer(list(example.answers), add_special_tokens=False).input_ids))
                found += [answer] if answer > room else []
        return found

    def note(self) -> str:
        """What was left out, and what was not read as it stands, in words; empty where nothing was."""
        counts = " and ".join(f"{count} {split}" for split, count in self.skipped.items())
        said = [f"{counts} examples are longer than {self.task.max_length} tokens and are left out"] if counts else []
        if self._not_compared:
            said.append(
                f"preference_accuracy leaves out {self._not_compared} examples whose given answers do not fit into "
                f"{self.task.max_length} tokens; task.too_long=cut-end cuts them"
            )
        for label, clients in self._alike.items():
            said.append(
                f"the training answers of {clients} clients are all {'' if label else 'un'}desirable (label "
                f"{str(label).lower()}), so that kto sees nothing to {'avoid' if label else 'prefer'} there"
            )
        if self._untrained:
            said.append(f"{self._untrained} messages of the assistant (weight=0, train=false) are not learned from")
        if self._unanswered:
            said.append(
                f"the replies of {self._unanswered} examples are reasoning (<think>) without an answer, so that no "
                "answer to them scores"
            )
        return "; ".join([*said, *read_as_text(self._spelled, self._halves)])

    def _count(self, client: str, split: str, seen: int, fitting: int) -> None:
        if seen > fitting:
            self.skipped[split] += seen - fitting
        if seen and not fitting:
            raise NoneFits(
                f"client {client}: none of its {seen} {split} examples fits into task.max_length="
                f"{self.task.max_length} tokens; raise it, or leave the client out"
            )

    def _lengths(self, examples: Sequence[Example]) -> list[Length]:
        """Plain texts in a template of text all at once, which is ten times as fast as others, one by one; of pairs the
        longer answer counts."""
        measured = self._measured(examples)
        pairs = [index for index, each in enumerate(examples) if each.rejected] if self.objective.preferences else []
        others = self._measured([preferences.rejected(examples[index]) for index in pairs])
        for index, (other, odd) in zip(pairs, others, strict=True):
            length, its = measured[index]
            measured[index] = length._replace(whole=max(length.whole, other.whole)), its.and_of(odd)
        for _, odd in measured:
            self._untrained += odd.untrained
            self._halves += odd.halves
            self._unanswered += odd.unanswered
            self._spelled.update(odd.spelled)
        return [length for length, _ in measured]

    def _measured(self, examples: Sequence[Example]) -> list[tuple[Length, Odd]]:
        odd = [self._look(example) for example in examples]
        texts = [example for example, its in zip(examples, odd, strict=True) if its.plain]
        together = iter(self._lengths_of_texts(texts) if texts else ())
        return [
            (next(together) if its.plain else self._length(example), its)
            for example, its in zip(examples, odd, strict=True)
        ]

    def _look(self, example: Example) -> Odd:
        safe, replies = self._filled.safe, [*example.answers[:1]]
        others, untrained = [*example.options], 0
        for turn in as_turns(example.prompt):
            untrained += turn.role == "assistant" and not turn.trained and not example.rejected
            (replies if turn.role == "assistant" else others).append(turn.content)
        if all(map(safe.is_plain, [*others, *replies])):
            text = isinstance(example.prompt, str) and (self.template.date is None or not example.prompt)
            return Odd(text and self.tokenizer.eos_token_id is not None, untrained)
        answers = (text[reasoning(text) :] for text in replies)
        spelled = next(filter(None, map(safe.spells, [*others, *answers])), None)
        return Odd(
            False,
            untrained,
            any(map(has_surrogates, [*others, *replies])),
            any(map(self._lacks_answer, example.answers[:1])),
            (spelled,) if spelled else (),
        )

    def _lacks_answer(self, reply: str) -> bool:
        """Whether a reply is reasoning alone. One that never ends is text where `<think>` has a token of its own."""
        rest = reply[reasoning(reply) :]
        ends = THOUGHT in reply and not rest
        return not answer_of(rest).strip() and (ends or THINK not in self.tokenizer.get_added_vocab())

    def _lengths_of_texts(self, examples: Sequence[Example]) -> Iterator[Length]:
        prompts = self.tokenizer([_written(self.template, str(example.prompt)) for example in examples])
        answers = self.tokenizer([_answer(example) for example in examples], add_special_tokens=False)
        for example, prompt, answer in zip(examples, prompts.input_ids, answers.input_ids, strict=True):
            before = len(prompt) - (prompt[-1:] == [self.tokenizer.eos_token_id])
            self._check([*prompt, *answer])
            yield Length(before, before + len(answer) + 1, not example.prompt)

    def _length(self, example: Example) -> Length:
        if not example.answers:
            return Length(len(self._before(example)), 0, not example.prompt)
        found = self.encoded(example)
        self._check(found.input_ids)
        return Length(len(self._before(example, found)), len(found.input_ids), not example.prompt)

    def _before(self, example: Example, found: Encoded | None = None) -> list[int]:
        """The tokens that the answer follows.

        Args:
            found: the whole example, if it has an answer.
        """
        if found is not None and example.prompt:
            return found.requested
        return encode_prompt(example.prompt, self.tokenizer, template=self.template)

    def _check(self, ids: Sequence[int]) -> None:
        if self.rows is not None:
            check_rows(ids, self.rows, self.tokenizer)

    def encoded(self, example: Example) -> Encoded:
        """The whole example with its first answer, whatever its length.

        Raises:
            UserError: it cannot be put into the template; a conversation is named by its beginning.
        """
        try:
            return encoded(example, self.tokenizer, self.template)
        except UserError as error:
            if isinstance(example.prompt, str):
                raise
            raise UserError(f"{error} (the conversation {one_line(text_of(example.prompt))[:80]!r})") from error

    def _query(self, example: Example) -> Query:
        """The prompt as it is in training; a reply is requested with reasoning where its reference has some."""
        found = self.encoded(example) if example.answers else None
        whole = self._before(example, found)
        prompt = whole[-self.task.max_length :] if self.task.too_long == "cut-start" else whole
        texts = tuple(dict.fromkeys(example.options))  # what is there twice is one option
        options = tuple(
            encode_continuation(example.prompt, option, self.tokenizer, template=self.template).answer
            for option in texts
        )
        right = tuple(index for index, option in enumerate(texts) if option in example.answers)
        pair = preferences.example_of("dpo", example, self._encode_one) if example.rejected else None
        if example.desirable is not None and self.objective.name == "kto":
            pair = self._encode(example)
        answers = tuple(map(_reference, example.answers))
        if found is not None and (example.fields or (reasoning(first := example.answers[0]) and THINK not in first)):
            # What the template makes of it, as it is to be generated: calls of tools, and reasoning that lacks its tag.
            text = str(self.tokenizer.decode(found.answer, skip_special_tokens=True))
            answers = (answer_of(text).strip(), *answers[1:])
        as_trained = pair if self.objective.preferences else found and self._fitting(found)
        return Query(prompt, answers, options, right, as_trained, pair)

    def _encode(self, example: Example) -> Trained | None:
        return preferences.example_of(self.objective.name, example, self._encode_one)

    def _is_left(self, example: Example) -> bool:
        """Whether something is left to learn of an example that is cut; two answers may be the same then."""
        found = self._encode(example)
        same = isinstance(found, AnswerPair) and found.chosen.input_ids == found.rejected.input_ids
        return found is not None and not same

    def _encode_one(self, example: Example) -> Encoded | None:
        found = self._fitting(self.encoded(example))
        return replace(found, extra=dict(example.extra)) if found and example.extra else found

    def _fitting(self, found: Encoded) -> Encoded | None:
        return fitting(found, self.task.max_length, self.task.loss_on, self.task.too_long)

    def _encode_fitting(self, example: Example) -> Trained:
        found = self._encode(example)
        assert found is not None  # see `training`
        return found

    def _beside_others(self, items: list[Any]) -> list[Any]:
        return preferences.beside_others(items, self.task.max_length)


class Encodings(Sequence[Item], Generic[Item]):
    """What an encoder makes of some examples, made when the first is looked at.

    Attributes:
        examples: of which it is made.
        lengths: theirs, where they are needed.

    Args:
        finish: what makes those of a site of all of them together, where they depend on each other.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        encode: Callable[[Example], Item],
        kept: _Kept,
        lengths: Sequence[Length] = (),
        finish: Callable[[list[Any]], list[Any]] | None = None,
    ):
        self.examples, self.lengths, self._kept, self._finish = examples, lengths, kept, finish
        self._count = len(examples)
        self._encode: Callable[[Example], Item] = encode
        self.items: list[Item] | None = None  # see `_Kept`

    def __len__(self) -> int:
        return self._count

    def first(self, most: int) -> list[Item]:
        """The first ones, without those behind them."""
        return [self._encode(example) for example in self.examples[:most]]

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        items = self.items
        if items is None:
            items = [self._encode(example) for example in self.examples]
            self.items = items = self._finish(items) if self._finish else items
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


def _written(template: Template, prompt: str) -> str:
    """A text template around a prompt; around none there is nothing."""
    return template.text.replace("{prompt}", prompt) if prompt else ""


def _answer(example: Example) -> str:
    return example.answers[0] if example.answers else ""


def _reference(answer: str) -> str:
    """An answer as it is compared with generated ones: without its reasoning."""
    text = without_surrogates(answer)
    return text[reasoning(text) :] or text


def _size(item: Trained | Query) -> int:
    if isinstance(item, Encoded):
        return len(item.input_ids)
    if not isinstance(item, Query):
        return sum(map(_size, item.texts))
    pair = item.pair if item.pair is not item.example else None
    return len(item.prompt) + sum(map(len, item.options)) + sum(_size(each) for each in (item.example, pair) if each)


def _up_to(most: int, splits: Iterator[Sequence[Example]]) -> Iterator[Sequence[Example]]:
    """The next ones, until they have so many examples together."""
    count = 0
    for examples in splits:
        yield examples
        count += len(examples)
        if count >= most:
            return
