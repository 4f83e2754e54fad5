"""YAML and `key=value` words, read without losing how a value is spelled.

YAML alone decides that `no` is false, `1e5` a number and `{prompt}` a mapping. What a setting means depends on its
type, which is known later. So what YAML takes for something else than a text is kept beside its text (`Spelled`), and
`settings.coerce` chooses between the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from llm_fed.basics.errors import UserError, one_line

MOST_NODES = 1_000_000  # values in a file, where an alias counts as often as it is used

NULLS = ("", "~", "null", "Null", "NULL")  # how YAML spells that there is no value

_TAG = "tag:yaml.org,2002:"
_VALUES = tuple(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float"))
_PLAIN = tuple(f"{_TAG}{kind}" for kind in ("str", "merge", "value", "seq", "map"))  # << and = are texts as well
_ANCHOR = re.compile(r"\A&\S+\s+")
_HINT = "put a text in quotes if it begins with one of {[*&!|>@`%-?, has : or # beside a space, or brackets in a list"


class Spelled:
    """A value that YAML does not take for a text."""

    def __init__(self, text: str | None, value: Any):
        self.text = text  # how it is spelled; None where it takes several lines
        self.value = value  # what YAML makes of it: null, a bool, a number, or a list or dictionary of these and texts

    def __repr__(self) -> str:
        return repr(plain(self))

    def __str__(self) -> str:
        return str(self.text)


class Word(Spelled):
    """What stands after the `=` of a `key=value` word. It has no quotes of YAML, since the shell has its own."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML 1.1, except that 1e5 is a number, as in YAML 1.2, and a date is a text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"[-+]?\d+(_\d+)*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read(text: str) -> Any:
    """A YAML document. Values that are no texts are `Spelled`, mappings too; the keys of these are texts as they stand.
    UserError where it is no YAML; in which line."""
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Document(loader, text).of(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        hint = f" ({_HINT})" if isinstance(error, ScannerError | ParserError | ComposerError) else ""
        raise UserError(f"{where}{one_line(error.problem or str(error))}{hint}") from error
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(one_line(str(error))) from error
    finally:
        if loader is not None:
            loader.dispose()


class _Document:
    """One document."""

    def __init__(self, loader: Any, text: str):
        self._loader, self._text, self._count = loader, text, 0

    def of(self, node: yaml.Node) -> Any:
        self._count += 1
        if self._count > MOST_NODES:
            raise ValueError(f"it holds more than {MOST_NODES:,} values, where an alias counts as often as it is used")
        if node.tag.startswith(_TAG) and node.tag not in (*_VALUES, *_PLAIN):
            raise ConstructorError(problem=f"the tag {node.tag} has no meaning here", problem_mark=node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            return Spelled(self._source(node), [self.of(item) for item in node.value])
        if isinstance(node, yaml.MappingNode):
            return Spelled(self._source(node), self._mapping(node))
        if node.tag in _VALUES:
            return Spelled(node.value, self._loader.construct_object(node))
        return node.value if node.tag in _PLAIN else self._source(node)  # `!x` is no tag, but the beginning of a text

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        own: dict[str, Any] = {}
        others: dict[str, Any] = {}  # that `<<` names, of which the first counts
        for key, value in node.value:
            if key.tag == f"{_TAG}merge":
                given = self.of(value)
                several = isinstance(given, Spelled) and isinstance(given.value, list)
                for each in given.value if several else [given]:
                    if (mapping := mapping_of(each)) is None:
                        raise ConstructorError(problem="<< takes mappings", problem_mark=value.start_mark)
                    others = {**mapping, **others}
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise ConstructorError(problem="a key is a list or a mapping", problem_mark=key.start_mark)
            if key.value in own:
                raise ConstructorError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            own[key.value] = self.of(value)
        return {**others, **own}

    def _source(self, node: yaml.Node) -> str | None:
        text = _ANCHOR.sub("", self._text[node.start_mark.index : _end(node)], 1)
        return None if "\n" in text else text


def _end(node: yaml.Node) -> int:
    """Where a node ends; the mark of one without brackets lies beyond comments and line breaks."""
    last = node.value[-1] if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value else None
    if last is None:
        return int(node.end_mark.index)
    return _end(last[1] if isinstance(node, yaml.MappingNode) else last)


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
    if value is None or isinstance(value, bool | float | str):
        return value
    raise UserError(f"the configuration holds a value that YAML cannot express: {one_line(repr(value))}")


def _key(key: Any) -> str:
    if isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool)):
        return str(key)
    if key is True:  # what other readers of YAML make of the key `on`, as in `stop.on`
        return "on"
    raise UserError(f"the configuration holds the key {one_line(repr(key))}; keys are texts")


def mapping_of(value: Any) -> dict[str, Any] | None:
    """The values by key where it is a mapping."""
    value = value.value if isinstance(value, Spelled) else value
    return value if isinstance(value, dict) else None


def plain(value: Any) -> Any:
    """What YAML makes of it, whatever the types of the settings."""
    if isinstance(value, Spelled):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


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
