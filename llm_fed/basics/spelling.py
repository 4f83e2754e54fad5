"""`key=value` words and values of a program, read without losing how a value is spelled, as `documents` does with
YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from llm_fed.basics.documents import Spelled, read
from llm_fed.basics.errors import UserError, one_line

NULLS = ("", "~", "null", "Null", "NULL")  # how YAML spells that there is no value


class Word(Spelled):
    """What stands after the `=` of a `key=value` word. It has no quotes of YAML, since the shell has its own."""


def word(text: str) -> Any:
    """What stands after the `=` of a `key=value` word; UserError where it holds bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{one_line(text)!r} holds bytes that are not UTF-8") from error
    try:
        given = read(text)
    except UserError:
        given = text  # a text that is no YAML; where a number is expected, its type says so
    value = given.value if isinstance(given, Spelled) else given
    return Word(text, text if value is None and text not in NULLS else value)  # to YAML `# x` is nothing as well


def created(value: Any) -> Any:
    """Nested values of a program, as `read` gives those of a file; UserError for what no file could hold."""
    if isinstance(value, Mapping):
        return {_key(key): created(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [created(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return Spelled(str(int(value)), int(value))  # a number may be a client's name
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, bool | float | str | Spelled):
        return value
    raise UserError(f"the configuration holds a value that YAML cannot express: {one_line(repr(value))}")


def _key(key: Any) -> str:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    if key is True:  # what other readers of YAML make of the key `on`, as in `stop.on`
        return "on"
    raise UserError(f"the configuration holds the key {one_line(repr(key))}; keys are texts")


_QUOTED = re.compile(r"""\s*('(?:[^']|'')*'|"(?:[^"\\]|\\.)*")\s*(?:,|\Z)""", re.DOTALL)


def names(text: str) -> list[str] | None:
    """The texts in `[a,b]`, each as it stands or in quotes, as one with a comma must be; None for another text."""
    inner, items, place = text.strip(), [], 0
    if not (len(inner) > 1 and inner[0] == "[" and inner[-1] == "]"):
        return None
    inner = inner[1:-1]
    while place < len(inner):
        if quoted := _QUOTED.match(inner, place):
            items.append(_unquoted(quoted[1]))
            place = quoted.end()
            continue
        end = _comma(inner, place)
        item = inner[place:end].strip() if end is not None else ""
        if end is None or not item:
            return [] if end == len(inner) and not items else None
        items.append(item)
        place = end + 1
    return items


def names_of(what: str, text: str) -> list[str]:
    """The texts in `a,b`, as `names` reads them in brackets; UserError where it is no such list, with `what` it is."""
    items = names(f"[{text}]")
    if items is None:
        raise UserError(
            f"{what} is {text!r}; it takes names separated by commas, in quotes where a name has one itself"
        )
    return items


def _comma(text: str, start: int) -> int | None:
    """Where the next comma outside of brackets is, or the end; None where brackets are closed that are not open."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "[") - (text[place] == "]")
        if depth < 0:
            return None
        if text[place] == "," and not depth:
            return place
    return None if depth else len(text)


def _unquoted(text: str) -> str:
    if text[0] == "'":
        return text[1:-1].replace("''", "'")
    try:
        return str(read(text))
    except UserError:
        return text  # no escapes of YAML, so the quotes are its own
