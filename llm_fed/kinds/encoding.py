"""Examples to tokens, as the task's settings say; what is too long is left out and counted, or cut.

Which examples fit is found out at the start; their tokens are made when they are looked at, and the last ones are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Generic, NamedTuple, TypeAlias, TypeVar, overload

from transformers import PreTrainedTokenizerBase

from llm_fed.basics.errors import UserError, lookup, one_line
from llm_fed.kinds.kind import in_scored_order
from llm_fed.method.requests import Query
from llm_fed.method.site import Data
from llm_fed.models.loading import check_rows
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.tasks import preferences
from llm_fed.tasks.common import AnswerPair, ClientData, Encoded, Example, Judged, Template, text_of
from llm_fed.tasks.control import THINK, answer_of, reasoning, without_surrogates
from llm_fed.tasks.templates import as_turns, encode_prompt, encoded, template_of

MOST = 2**16  # examples whose tokens are kept, those that were looked at last; of 250 tokens they take 0.7 GiB
ABILITY_TOKENS = 128  # of a paragraph of `eval.ability`, which is cut there; most have 80
Trained: TypeAlias = Encoded | AnswerPair | Judged
Item = TypeVar("Item")


class Length(NamedTuple):
    """Tokens of an example."""

    prompt: int
    whole: int  # with the response; of two answers with the longer one


class Encoder:
    """Encodes the examples of all clients of a task. UserError: there is no such template; later: an example cannot
    fill it, or has a token without an embedding. `skipped`: how many examples of each split were longer than
    `task.max_length` tokens. `none_fits`: in words, the splits of the last client of which no example fits. `template`:
    instead of the one that `task.template` names. `rows`: of the base's embedding, if they are known. `room`: how many
    tokens may be answered to a prompt of so many, where answers are texts."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: Config,
        template: Template | None = None,
        rows: int | None = None,
        room: Callable[[int], int] | None = None,
    ):
        self.tokenizer, self.config, self.rows, self._room = tokenizer, config, rows, room
        self.task, self.objective = config.task, config.objective
        self.template = template or template_of(self.task.template, tokenizer)
        self.skipped: Counter[str] = Counter()
        self.none_fits: list[str] = []
        self._trained = lru_cache(MOST)(lambda example: self._item(self.objective.name, example))
        self._queried = lru_cache(MOST)(self._query)
        self._untrained = 0  # messages of the assistant that are no targets
        self._not_compared = 0  # examples that are asked, whose given answers are too long
        self._alike: Counter[bool] = Counter()  # clients whose answers are all desirable (True), or all not
        self._ability = self._fixed_text() if config.eval.ability and not self.objective.preferences else ()

    def data(self, id: str, given: ClientData, data: Data) -> Data:
        config, before, self.none_fits = self.config, self.skipped.copy(), []
        held_out = self.training(id, "validation", given.validation, required=False)
        queries = {
            split: self.queries(id, split, in_scored_order(own, own, split, config), config.eval.limit)
            for split, own in (("validation", given.validation), ("test", given.test))
        }
        cut = {split: lengths for split, requested in queries.items() if (lengths := self.cut(requested))}
        return replace(
            data, train=self.training(id, "training", given.train), held_out=held_out, queries=queries,
            left_out=self.skipped - before, cut=cut, none_fits=tuple(self.none_fits), ability=self._ability,
        )  # fmt: skip

    def _fixed_text(self) -> Sequence[Query]:
        """The paragraphs of the text of `eval.ability`, as they stand and the same for all data."""
        text = (Path(__file__).parents[1] / "assets" / "ability.txt").read_text(encoding="utf-8")
        plain = Config(task=TaskConfig(template="plain", max_length=ABILITY_TOKENS, too_long="cut-end"))
        examples = [Example("", (paragraph,)) for paragraph in text.strip().split("\n\n")]
        return Encoder(self.tokenizer, plain, rows=self.rows).queries("", "ability", examples)

    def lengths(self, examples: Sequence[Example]) -> list[Length]:
        """How long examples are."""
        self._check(examples)
        return [self._length(example) for example in examples]

    def training(
        self, client: str, split: str, examples: Sequence[Example], required: bool = True
    ) -> Sequence[Trained]:
        """What training sees: prompt and response together. Without `required` nothing is said of what does not fit."""
        self._check(examples)
        chosen = []
        for example in examples:
            found = self._item(self.objective.name, example) if example.answers else None
            same = isinstance(found, AnswerPair) and found.chosen.input_ids == found.rejected.input_ids
            if found is not None and not same:  # two answers that are cut may be the same
                chosen.append(example)
        if required:
            self._count(client, split, len(examples), len(chosen))
        if required and self.objective.name == "kto" and len({example.desirable for example in chosen}) == 1:
            self._alike[bool(chosen[0].desirable)] += 1
        return Encodings(chosen, self._train)

    def queries(
        self, client: str, split: str, examples: Sequence[Example], limit: int | None = None
    ) -> Sequence[Query]:
        """What evaluation asks: of the examples whose prompt fits, the first `limit`."""
        self._check(examples)
        skips, most = self.task.too_long == "skip", self.task.max_length
        lengths: dict[int, Length] = {}  # by index
        seen = 0
        for index, example in enumerate(examples):
            if limit is not None and len(lengths) == limit:
                break
            seen, length = seen + 1, self._length(example)
            needed = length.prompt if example.prompt or not skips else length.whole
            if self.task.too_long == "cut-start" or needed <= most:
                lengths[index] = length
        self._count(client, split, seen, len(lengths))
        if self.objective.preferences and skips:
            self._not_compared += sum(length.whole > most for length in lengths.values())
        chosen = [examples[index] for index in lengths]
        return Encodings(chosen, lambda own, index: self._queried(own[index]), [*lengths.values()])

    def cut(self, queries: Sequence[Query]) -> list[int]:
        """The tokens of the right answers to `queries`, of those that are longer than the model may answer; of several
        right answers to one the shortest."""
        if self._room is None or not isinstance(queries, Encodings):
            return []
        found = []
        for example, length in zip(queries.examples, queries.lengths, strict=True):
            room = self._room(min(length.prompt, self.task.max_length))
            if example.answers and length.whole - length.prompt - 1 > room:  # one token ends it, or more
                ids = self.tokenizer([*example.answers], add_special_tokens=False, split_special_tokens=True).input_ids
                answer = min(map(len, ids))
                found += [answer] if answer > room else []
        return found

    def note(self) -> str:
        """What was left out, and what is not learned from, in words; empty where nothing was."""
        counts = " and ".join(f"{count} {split}" for split, count in self.skipped.items())
        said = [f"{counts} examples are longer than {self.task.max_length} tokens and are left out"] if counts else []
        if self._not_compared:
            said.append(
                f"preference_accuracy leaves out {self._not_compared} examples whose given answers do not fit into "
                f"{self.task.max_length} tokens; task.too_long=cut-end cuts them"
            )
        for label, clients in self._alike.items():
            said.append(
                f"all training answers are {'' if label else 'un'}desirable at {clients} of the clients (label "
                f"{str(label).lower()}), so that kto sees nothing to {'avoid' if label else 'prefer'} there"
            )
        if self._untrained:
            said.append(f"{self._untrained} messages of the assistant (weight=0, train=false) are not learned from")
        return "; ".join(said)

    def _train(self, examples: Sequence[Example], index: int) -> Trained:
        """What training sees of an example of which something is left to learn; of a judged answer beside that of the
        example before it."""
        item, before = self._trained(examples[index]), None
        assert item is not None  # see `training`
        if isinstance(item, Judged):
            before = self._trained(examples[index - 1])
        return beside(item, before.text, self.task.max_length) if isinstance(before, Judged) else item

    def _check(self, examples: Sequence[Example]) -> None:
        """Refuse what the objective does not learn from, and count what is not learned from."""
        if self.objective.name != "sft":
            preferences.check(self.objective.name, examples)
        turns = (turn for example in examples if not example.rejected for turn in as_turns(example.prompt))
        self._untrained += sum(turn.role == "assistant" and not turn.trained for turn in turns)

    def _count(self, client: str, split: str, seen: int, fitting: int) -> None:
        if seen > fitting:
            self.skipped[split] += seen - fitting
        if seen and not fitting:
            self.none_fits.append(
                f"client {client}: none of its {seen} {split} examples fits into task.max_length="
                f"{self.task.max_length} tokens; raise it, or leave the client out"
            )

    def _length(self, example: Example) -> Length:
        if not example.answers:
            return Length(len(encode_prompt(example.prompt, self.tokenizer, template=self.template)), 0)
        found = self.encoded(example)
        compared = [preferences.rejected(example)] if example.rejected and self.objective.preferences else []
        whole = max(len(each.input_ids) for each in (found, *map(self.encoded, compared)))
        if example.prompt:
            return Length(len(found.requested), whole)
        return Length(len(encode_prompt("", self.tokenizer, template=self.template)), whole)

    def encoded(self, example: Example) -> Encoded:
        """The whole example with its first answer, whatever its length. UserError: it cannot be put into the template;
        a conversation is named by its beginning."""
        try:
            found = encoded(example, self.tokenizer, self.template)
        except UserError as error:
            if isinstance(example.prompt, str):
                raise
            raise UserError(f"{error} (the conversation {one_line(text_of(example.prompt))[:80]!r})") from error
        if self.rows is not None:
            check_rows(found.input_ids, self.rows, self.tokenizer)
        return found

    def _query(self, example: Example) -> Query:
        """The prompt as it is in training; a reply is requested with reasoning where its reference has some."""
        found = self.encoded(example) if example.answers else None
        if found is not None and example.prompt:
            whole = found.requested
        else:
            whole = encode_prompt(example.prompt, self.tokenizer, template=self.template)
        prompt = whole[-self.task.max_length :] if self.task.too_long == "cut-start" else whole
        texts = tuple(dict.fromkeys(example.options))  # what is there twice is one option
        options = tuple(
            encoded(Example(example.prompt, (option,)), self.tokenizer, self.template).answer for option in texts
        )
        right = tuple(index for index, option in enumerate(texts) if option in example.answers)
        pair = self._item("dpo", example) if example.rejected else None
        if example.desirable is not None and self.objective.name == "kto":
            pair = self._item("kto", example)
        plain = map(without_surrogates, example.answers)
        answers = tuple(answer[reasoning(answer) :] or answer for answer in plain)
        if found is not None and (example.fields or (reasoning(first := example.answers[0]) and THINK not in first)):
            # What the template makes of it, as it is to be generated: calls of tools, and reasoning that lacks its tag.
            text = str(self.tokenizer.decode(found.answer, skip_special_tokens=True))
            answers = (answer_of(text).strip(), *answers[1:])
        as_trained = pair if self.objective.preferences else found and self._fit(example, found)
        return Query(prompt, answers, options, right, as_trained, pair)

    def _item(self, loss: str, example: Example) -> Trained | None:
        """What a loss is given of an example; None where it is too long, or no target is left."""
        one = self._fit(example)
        if loss == "sft" or one is None:
            return one
        if loss == "kto":
            return Judged(one, bool(example.desirable), one)
        other = self._fit(preferences.rejected(example))
        return AnswerPair(one, other) if other and any(other.target) and any(one.target) else None

    def _fit(self, example: Example, found: Encoded | None = None) -> Encoded | None:
        """Tokens as the task's settings want them; None where they are skipped, or where no target is left. `found`:
        the whole example, where it is known."""
        found, most = found or self.encoded(example), self.task.max_length
        if example.extra:
            found = replace(found, extra=dict(example.extra))
        if len(found.input_ids) > most:
            kept = {"skip": slice(0), "cut-end": slice(most), "cut-start": slice(-most, None)}[self.task.too_long]
            found = replace(found, input_ids=found.input_ids[kept], target=[False, *found.target[kept][1:]])
            if not any(found.target):
                return None
        if lookup("task.loss_on", self.task.loss_on, {"response": False, "all": True}):
            return replace(found, target=[False] + [True] * (len(found.input_ids) - 1))
        return found


def beside(item: Judged, other: Encoded, max_length: int) -> Judged:
    """An answer with its prompt beside another example's answer."""
    requested, answer = item.text.requested, other.answer
    ids = [*requested, *answer][:max_length]
    target = [False] * len(requested) + [True] * len(answer)
    return replace(item, other=Encoded(ids, target[: len(ids)]))


@dataclass(eq=False)
class Encodings(Sequence[Item], Generic[Item]):
    """What an encoder makes of some examples, each when it is looked at; with their lengths, where they are needed."""

    examples: Sequence[Example]
    encode: Callable[[Sequence[Example], int], Item]
    lengths: Sequence[Length] = ()

    def __len__(self) -> int:
        return len(self.examples)

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        indices = range(len(self.examples))[index]
        if isinstance(indices, int):
            return self.encode(self.examples, indices)
        return [self.encode(self.examples, each) for each in indices]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]
