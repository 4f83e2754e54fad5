"""`key=value` words and values of a program, read without losing how a value is spelled, as `documents` does with
YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from llm_fed.basics.documents import Map, Spelled, plain, read
from llm_fed.basics.errors import UserError, one_line

NULLS = ("", "~", "null", "Null", "NULL")  # how YAML spells that there is no value


class Word(Spelled):
    """What stands after the `=` of a `key=value` word. It has no quotes of YAML, since the shell has its own."""


def word(text: str) -> Word | Map:
    """What stands after the `=` of a `key=value` word; UserError where it holds bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{one_line(text)!r} holds bytes that are not UTF-8") from error
    try:
        given = read(text)
    except UserError:
        given = text  # a text that is no YAML; where a number is expected, its type says so
    if isinstance(given, Map):
        return given
    value = plain(given)
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
    raise UserError(f"the configuration holds the key {one_line(repr(key))}; keys are texts")


# In a list: a text in quotes, or one that stands for itself, where a comma within brackets is its own.
_ITEM = re.compile(r"""\s*(?:('(?:[^']|'')*'|"(?:[^"\\]|\\.)*")\s*|((?:[^,\[\]]|\[[^\[\]]*\])+))(?:,|\Z)""", re.DOTALL)


def names(text: str) -> list[str] | None:
    """The texts in `[a,b]`, each as it stands or in quotes, as one with a comma must be; None for another text."""
    inner, items, place = text.strip(), [], 0
    if not (len(inner) > 1 and inner[0] == "[" and inner[-1] == "]"):
        return None
    inner = inner[1:-1].strip()
    while place < len(inner):
        item = _ITEM.match(inner, place)
        if item is None or not item[0].strip(", "):
            return None
        items.append(_unquoted(item[1]) if item[1] else item[2].strip())
        place = item.end()
    return items


def names_of(what: str, text: str) -> list[str]:
    """The texts in `a,b`, as `names` reads them in brackets; UserError where it is no such list, with `what` it is."""
    items = names(f"[{text}]")
    if items is None:
        raise UserError(
            f"{what} is {text!r}; it takes names separated by commas, in quotes where a name has one itself"
        )
    return items


def _unquoted(text: str) -> str:
    if text[0] == "'":
        return text[1:-1].replace("''", "'")
    try:
        return str(read(text))
    except UserError:
        return text  # no escapes of YAML, so the quotes are its own
