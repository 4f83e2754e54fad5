"""Rows as Examples: prompts with context, system text and history; conversations; options; texts.

{"instruction": "Which ward?", "input": "A burn.", "output": "Burns.", "system": "You are a clerk.",
 "history": [["Which ward for a fracture?", "Surgery."]]}
{"messages": [{"role": "user", "content": "Which ward?"}, {"role": "assistant", "content": "Burns."}]}
{"prompt": [{"role": "user", "content": "Which ward?"}], "completion": [{"role": "assistant", ...}]}
{"question": "Which ward?", "choices": ["Surgery.", "Burns."], "answer": 1}              MMLU: indices from 0 on
{"choices": {"text": ["Surgery.", "Burns."], "label": ["A", "B"]}, "answerKey": "B"}    ARC
{"options": {"A": "Surgery.", "B": "Burns."}, "answer": "B"}                            MedQA
{"A": "Surgery.", "B": "Burns.", "answer": "B"}                                         MMLU and C-Eval as CSV
{"prompt": "Which ward?", "chosen": "Burns.", "rejected": "No idea."} (see `preferences`)
{"prompt": "Which ward?", "completion": "Burns.", "label": true}
{"text": "A text that is learned as it stands."}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from string import ascii_uppercase
from typing import Literal, TypeGuard

from llm_fed.basics.errors import UserError
from llm_fed.rows import Cell, Row, cells, columns
from llm_fed.settings.config import ColumnsConfig
from llm_fed.tasks import preferences
from llm_fed.tasks.common import Example, Turn
from llm_fed.tasks.conversations import Message, turns_of

SAMPLE = 200  # rows of a file that are looked at before the first becomes an Example
_OPTIONAL = ("input", "system", "history", "options")  # roles that a row may lack
BY_PLACE = ("choices", "endings")  # columns beside which a number is usually a place
_LETTER = re.compile(r"\(?([A-Za-z])[).:]?")
Kind = Literal["text", "place"]


@dataclass(eq=False)
class Scheme:
    """How the rows of a file become Examples, by the configured columns (`wanted`), of which one may name the client
    (`whose`) and the split (`side`). `label`: the column that a partition divides by, instead of by client."""

    wanted: ColumnsConfig
    where: str
    label: str | None = None
    whose: bool = False
    side: bool = False
    names: dict[str, None] = field(default_factory=dict)  # all columns that the rows have had so far
    roles: dict[str, str] = field(default_factory=dict)  # role (a key of `columns.USUAL_NAMES`) -> column
    _letters: tuple[str, ...] = ()  # columns that hold an option each
    _choices: Choices | None = None
    _seen: set[tuple[str, ...]] = field(default_factory=set)
    _sample: list[columns.Values] = field(default_factory=list)

    def learn(self, sample: Sequence[Row]) -> None:
        """Choose the columns by some rows; UserError as in `columns.resolve`."""
        self._sample = [row.values for row in sample]
        for values in self._sample:
            self._is_new(values)
        self._resolve()
        if self.label is not None:
            columns.configured("task.partition.label", self.label, [*self.names], self._sample, sample[0].where)
        if self._letters or "options" in self.roles:
            self._choices = Choices(self.roles.get("options", ""))
            for row in sample:
                with suppress(UserError):  # it comes again when the row is requested
                    self._example(row, "")
            self._choices.learning = False

    def example(self, row: Row, client: str) -> Example:
        """The row as an Example; UserError where it cannot be used: where it is, and why."""
        if self._is_new(row.values):
            before, letters = self.roles, self._letters
            self._resolve()
            changed = {role for role in {*before, *self.roles} if before.get(role) != self.roles.get(role)}
            if (changed - {*_OPTIONAL} or letters != self._letters) and before:
                role = next(iter(changed), "answer")
                raise UserError(
                    f"{row.where}: it has columns that no row before has, by which those would be read otherwise; "
                    f"set task.columns.{role}=COLUMN"
                )
        example = self._example(row, cells.text_of(row, self.label) if self.label else client)
        extra = tuple((name, cells.number_of(row, name)) for name in self.wanted.extra)
        return replace(example, extra=extra, where=row.where)

    def _example(self, row: Row, group: str) -> Example:
        roles = self.roles
        if "text" in roles:
            return Example("", (cells.text_of(row, roles["text"]),), (), group)
        if "chosen" in roles:
            return _preference(row, roles, group)
        if "messages" in roles:
            value = cells.parsed(cells.held(row, roles["messages"]))
            found = _conversation(_with_system(row, roles, turns_of(value, row.where, roles["messages"])), group)
        else:
            found = self._answered(row, group)
        if "label" in roles:
            label = roles["label"]
            found = replace(found, desirable=preferences.desirable(cells.held(row, label), row.where, label))
        return found

    def _answered(self, row: Row, group: str) -> Example:
        roles, prompt, answer = self.roles, self.roles["prompt"], self.roles["answer"]
        requested, right = _structured(cells.held(row, prompt)), _structured(cells.held(row, answer))
        if isinstance(requested, list) or (isinstance(right, list) and _is_talk(right)):
            talk = requested if _is_talk(requested) else _as_question(requested, row.where, prompt)
            return _conversation(_whole(row, roles, "answer", talk, right), group)
        text = cells.as_text(requested, row.where, prompt)
        if "input" in roles:
            text = _with_context(row, roles["input"], text)
        if isinstance(right, dict) and isinstance(right.get("text"), list):
            right = right["text"]
        options, labels = tuple[str, ...](), tuple[str, ...]()
        if self._letters:
            texts = {column: option for column in self._letters if (option := cells.optional(row, column))}
            options, labels = tuple(texts.values()), tuple(texts)
        elif "options" in roles:
            options, labels = options_of(row, roles["options"])
        if options:
            self._choices = self._choices or Choices(roles.get("options", ""))
            answers = self._choices.right(row, answer, right, options, labels)
        elif isinstance(right, list):
            answers = cells.texts_of(right, row.where, answer)
        else:
            answers = (cells.as_text(right, row.where, answer),)
        earlier = _earlier(row, roles) if {"system", "history"} & roles.keys() else ()
        return Example((*earlier, Turn("user", text)) if earlier else text, answers, options, group)

    @property
    def used(self) -> list[str]:
        """The columns whose content counts."""
        return [*self.roles.values(), *self._letters, *self.wanted.extra, *([self.label] if self.label else [])]

    def _is_new(self, values: columns.Values) -> bool:
        """Whether a row has a column that none before it has."""
        keys = tuple(values)
        if keys in self._seen:
            return False
        self._seen.add(keys)
        before = len(self.names)
        self.names.update(dict.fromkeys(keys))
        return len(self.names) > before

    @property
    def _seen_columns(self) -> columns.SeenColumns:
        return columns.SeenColumns([*self.names], self._sample, self.where, self.whose, self.side)

    def _resolve(self) -> None:
        resolved = columns.resolve(self.wanted, self._seen_columns)
        self.roles, self._letters = resolved, ()
        if "A" not in self.names or "answer" not in resolved or "options" in resolved:
            return
        count = next((index for index, letter in enumerate(ascii_uppercase) if letter not in self.names), 26)
        letters = tuple(ascii_uppercase[:count])
        answers = [values.get(resolved["answer"]) for values in self._sample]
        if count > 1 and answers and all(str(each).strip() in letters for each in answers):
            self._letters = letters


def _with_context(row: Row, column: str, text: str) -> str:
    context = cells.optional(row, column)
    return f"{text}\n\n{context}" if context else text


def _as_question(value: Cell, where: str, column: str) -> list[Message]:
    return [{"role": "user", "content": cells.as_text(value, where, column)}]


def _preference(row: Row, roles: Mapping[str, str], group: str) -> Example:
    """A row with two answers, of which the first is preferred."""
    chosen = _structured(cells.held(row, roles["chosen"]))
    rejected = _structured(cells.held(row, roles["rejected"]))
    requested = _structured(cells.held(row, roles["prompt"])) if "prompt" in roles else None
    if requested is None and isinstance(chosen, str) and isinstance(rejected, str):
        talks = preferences.messages_of(chosen), preferences.messages_of(rejected)
        if all(talks):
            chosen, rejected = talks
        else:
            one = cells.as_text(chosen, row.where, roles["chosen"])
            other = cells.as_text(rejected, row.where, roles["rejected"])
            requested, chosen, rejected = preferences.apart(one, other, row.where)
    if requested is not None and not _is_talk(requested):
        column = roles.get("prompt", "chosen")
        if not _is_talk(chosen) and not _is_talk(rejected):
            text = cells.as_text(requested, row.where, column)
            text = _with_context(row, roles["input"], text) if "input" in roles else text
            one = cells.as_text(chosen, row.where, roles["chosen"])
            other = cells.as_text(rejected, row.where, roles["rejected"])
            return preferences.of_texts(text, one, other, _earlier(row, roles), row.where, group)
        requested = _as_question(requested, row.where, column)
    preferred = _whole(row, roles, "chosen", requested, chosen)
    return preferences.of_conversations(
        preferred, _whole(row, roles, "rejected", requested, rejected), row.where, group
    )


def _whole(
    row: Row, roles: Mapping[str, str], role: str, requested: list[Message] | None, answer: Cell
) -> tuple[Turn, ...]:
    """The conversation that ends with an answer, which is a text or messages, perhaps all of the conversation."""
    column = roles[role]
    talk = answer if _is_talk(answer) else [{"role": "assistant", "content": cells.as_text(answer, row.where, column)}]
    begins = talk[0].get("role", talk[0].get("from")) not in ("assistant", "gpt")
    if begins and requested is not None:
        preferences.check_prompt(_unsaid(requested, talk), talk, row.where, column)
    whole = talk if begins or requested is None else [*requested, *talk]
    said = column if begins else roles.get("prompt", column)
    return _with_system(row, roles, turns_of(whole, row.where, said))


def _unsaid(requested: list[Message], answer: list[Message]) -> list[Message]:
    """The messages of a prompt, without a system text that a conversation leaves out."""
    roles = [str(talk[0].get("role", talk[0].get("from"))).strip().casefold() for talk in (requested, answer)]
    return requested[1:] if roles[0] == "system" != roles[1] and len(requested) > 1 else requested


def _with_system(row: Row, roles: Mapping[str, str], turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns after the row's own system text, if there is one."""
    system = cells.optional(row, roles.get("system"))
    if system and turns[0].role == "system" and turns[0].content != system:
        raise UserError(
            f"{row.where}: the column {roles['system']!r} and the first message are two system texts; keep one"
        )
    return (Turn("system", system), *turns) if system and turns[0].role != "system" else turns


def _conversation(turns: tuple[Turn, ...], group: str) -> Example:
    """A conversation whose last turn is the answer."""
    return Example(turns[:-1], (turns[-1].content,), (), group, turns[-1].fields)


def _earlier(row: Row, roles: Mapping[str, str]) -> tuple[Turn, ...]:
    """The turns before the prompt: the system text and the history."""
    system, column = cells.optional(row, roles.get("system")), roles.get("history")
    turns = (Turn("system", system),) if system else ()
    if column is None or cells.is_empty(value := row.values.get(column)):
        return turns
    spoken = _history(cells.parsed(value), row.where, column)
    if turns and spoken and spoken[0].role == "system":
        raise UserError(
            f"{row.where}: column {column!r} begins with another system text than that of the row; keep one"
        )
    return (*turns, *spoken)


def _history(value: Cell, where: str, column: str) -> tuple[Turn, ...]:
    """Earlier questions with their answers, a list of pairs, or messages."""
    turns: list[Turn] = []
    if _is_talk(value):
        return turns_of(value, where, column)
    for pair in value if isinstance(value, list) else [value]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(
                f"{where}: column {column!r} is no list of pairs [question, answer]; correct it, or drop the row"
            )
        question, answer = (cells.as_text(each, where, column) for each in pair)
        turns += [Turn("user", question), Turn("assistant", answer)]
    return tuple(turns)


def _structured(value: Cell) -> Cell:
    """A list of messages or of answers, also as text, and of one message alone; any other value as it is."""
    if isinstance(value, dict) and {"role", "from"} & value.keys():
        return [value]
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
        inner = cells.parsed(value)
        answers = isinstance(inner, dict) and isinstance(inner.get("text"), list)
        return inner if answers or _is_talk(inner) else value
    return value


def _is_talk(value: Cell) -> TypeGuard[list[Message]]:
    """Whether a cell holds messages."""
    each = value if isinstance(value, list) else []
    return bool(each) and all(isinstance(message, dict) and {"role", "from"} & message.keys() for message in each)


class Choices:
    """How the answers of a file name options. Where `2` is an option and also the place of another one, the first rows
    decide: all answers of a file are of one kind."""

    def __init__(self, column: str):  # that holds the options
        self._usual: Kind = "place" if column.casefold() in BY_PLACE else "text"
        self._certain: set[Kind] = set()  # kinds of the answers that can only be one
        self._guessed = ""  # the first answer that could be both
        self.learning = True  # whether the rows are only looked at

    def right(
        self, row: Row, column: str, value: Cell, options: Sequence[str], labels: Sequence[str]
    ) -> tuple[str, ...]:
        """The right option, or several texts one of which is an option; UserError where the answer is none of them, or
        of another kind than those before."""
        texts = cells.texts_of(value, row.where, column)
        if labels and len(texts) == 1 and texts[0].strip() in labels:
            return (options[labels.index(texts[0].strip())],)
        index = None if labels or isinstance(value, list) else _place(texts[0], len(options))
        named = bool({*texts} & {*options})
        if index is None and not named:
            raise UserError(f"{row.where}: the answer {texts[0]!r} is none of the options {[*options]}")
        both = index is not None and named and options[index] != texts[0]
        kind = self._kind(row, texts[0], None if both or labels else "text" if named else "place")
        return texts if index is None or (named and kind == "text") else (options[index],)

    def _kind(self, row: Row, text: str, certain: Kind | None) -> Kind:
        """What an answer is; `certain` if it can only be that."""
        either = len(self._certain) > 1 if certain is None else self._guessed and certain not in self._certain
        if either:
            raise UserError(
                f"{row.where}: the answer {self._guessed or text!r} is an option and also the place of another one, "
                "and other answers of the file are of both kinds; write the right option out"
            )
        if certain is not None:
            self._certain.add(certain)
            return certain
        self._guessed = self._guessed or ("" if self.learning else text)
        return next(iter(self._certain), self._usual)


def options_of(row: Row, column: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(options, their labels if they have any) in one column; none where the cell is empty or not there. UserError
    where it is no list of texts."""
    value = cells.parsed(cells.value_of(row, column))
    if value is None or value == "":
        return (), ()
    labels: list[Cell] = []
    if isinstance(value, dict):
        texts, named = value.get("text"), value.get("label")
        labels = [*value] if not isinstance(texts, list) else named if isinstance(named, list) else []
        value = texts if isinstance(texts, list) else [*value.values()]
    elif isinstance(value, list) and value and all(isinstance(each, dict) and "text" in each for each in value):
        objects = [each for each in value if isinstance(each, dict)]
        value, labels = [each["text"] for each in objects], [each.get("label", each.get("key")) for each in objects]
    options = cells.texts_of(value, row.where, column)
    if labels and (len(labels) != len(options) or None in labels):
        raise UserError(f"{row.where}: column {column!r} has {len(options)} options and {len(labels)} labels")
    return options, tuple(str(label).strip() for label in labels)


def _place(text: str, count: int) -> int | None:
    """The place among so many options that a number (from 0 on) or a letter stands for."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        index = int(text[:9])
    elif match := _LETTER.fullmatch(text):
        index = ord(match[1].upper()) - ord("A")
    else:
        return None
    return index if index < count else None
