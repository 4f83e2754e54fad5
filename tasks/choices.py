"""Options of a question, and which of them is right: a text, the place of one, its letter, or its label.

{"choices": ["Surgery.", "Burns."], "answer": 1}                                    MMLU: places from 0 on
{"choices": {"text": ["Surgery.", "Burns."], "label": ["A", "B"]}, "answerKey": "B"}    ARC
{"options": {"A": "Surgery.", "B": "Burns."}, "answer": "B"}                        MedQA
{"A": "Surgery.", "B": "Burns.", "answer": "B"}                                     MMLU and C-Eval as CSV
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from llm_fed.basics.errors import UserError
from llm_fed.rows import Row, cells

BY_PLACE = ("choices", "endings")  # columns beside which a number is usually a place
_LETTER = re.compile(r"\(?([A-Za-z])[).:]?")
Kind = Literal["text", "place"]


class Choices:
    """How the answers of a file name options. Where `2` is an option and also the place of another one, the first rows
    decide: all answers of a file are of one kind."""

    def __init__(self, column: str):  # that holds the options
        self._usual: Kind = "place" if column.casefold() in BY_PLACE else "text"
        self._certain: set[Kind] = set()  # kinds of the answers that can only be one
        self._guessed = ""  # the first answer that could be both
        self.learning = True  # whether the rows are only looked at

    def right(
        self, row: Row, column: str, value: Any, options: Sequence[str], labels: Sequence[str]
    ) -> tuple[str, ...]:
        """The right option, or several texts one of which is an option; UserError where the answer is none of them, or
        of another kind than those before."""
        texts = cells.texts_of(value, row.where, column)
        if labels and len(texts) == 1 and texts[0].strip() in labels:
            return (options[labels.index(texts[0].strip())],)
        place = None if labels or isinstance(value, list) else _place(texts[0], len(options))
        named = bool({*texts} & {*options})
        if place is None and not named:
            raise UserError(f"{row.where}: the answer {texts[0]!r} is none of the options {[*options]}")
        both = place is not None and named and options[place] != texts[0]
        kind = self._kind(row, texts[0], None if both or labels else "text" if named else "place")
        return texts if place is None or (named and kind == "text") else (options[place],)

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


def options_of(row: Row, column: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(options, their labels if they have any) in one column; none where the cell is empty or there is no such column.
    UserError where it is no list of texts."""
    value = cells.value_of(row, column)
    if column is None or value is None or value == "":
        return (), ()
    value = cells.parsed(value)
    labels: Any = ()
    if isinstance(value, dict):
        texts = value.get("text")
        value, labels = (texts, value.get("label") or ()) if isinstance(texts, list) else ([*value.values()], [*value])
    elif isinstance(value, list) and value and all(isinstance(each, dict) and "text" in each for each in value):
        value, labels = [each["text"] for each in value], [each.get("label", each.get("key")) for each in value]
    options = cells.texts_of(value, row.where, column)
    if labels and (len(labels) != len(options) or None in labels):
        raise UserError(f"{row.where}: column {column!r} has {len(options)} options and {len(labels)} labels")
    return options, tuple(str(label).strip() for label in labels)


def lettered(row: Row, columns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(options, their letters) of columns with one option each; those that are empty are none."""
    texts = {column: text for column in columns if (text := cells.optional(row, column))}
    return tuple(texts.values()), tuple(texts)


def _place(text: str, count: int) -> int | None:
    """The place among so many options that a number (from 0 on) or a letter stands for."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        place = int(text[:9])
    elif match := _LETTER.fullmatch(text):
        place = ord(match[1].upper()) - ord("A")
    else:
        return None
    return place if place < count else None
