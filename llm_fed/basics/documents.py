"""YAML and JSON, also a stranger's, `key=value` words, and values of a program: all that llm_fed reads goes through
here, but for rows of data.

YAML alone decides that `no` is false, `1e5` a number and `{prompt}` a mapping. What a setting means depends on its
type, which is known later. So a node's text is kept beside its value, and `settings.coerce` chooses between the two.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from llm_fed.basics.errors import UserError, one_line

Json: TypeAlias = "None | bool | int | float | str | Sequence[Json] | Mapping[str, Json]"  # what a document holds
LONGEST = 2**21  # characters of a YAML document
REPEATED = 10**5  # characters that its aliases may add, where each value counts as one more
NULLS = ("", "~", "null", "Null", "NULL")  # how YAML spells that there is no value
_LONGEST_NUMBER = 400

_TAG = "tag:yaml.org,2002:"
_VALUES = tuple(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float"))
_TEXTS = tuple(f"{_TAG}{kind}" for kind in ("str", "merge", "value"))  # << and = are texts as well
_COLLECTIONS = tuple(f"{_TAG}{kind}" for kind in ("seq", "map"))
_HINT = "put a text in quotes if it begins with one of {[*&!|>@`%-?, has : or # beside a space, or brackets in a list"


class _Loader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):  # type: ignore[misc]
    """YAML 1.1, except that 1e5 is a number, as in YAML 1.2, and a date is a text."""


class _Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """Puts in quotes what `_Loader` would not take for a text."""


_NUMBER = re.compile(r"[-+]?\d+(_\d+)*(\.[\d_]*)?[eE][-+]?\d+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}float", _NUMBER, list("-+0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


@dataclass(eq=False, repr=False)
class Spelled:
    """A null, bool or number, and its text as it is spelled."""

    text: str
    value: Tree

    def __repr__(self) -> str:
        return repr(self.value)

    def __str__(self) -> str:
        return self.text


Tree: TypeAlias = "None | bool | float | str | Spelled | list[Tree] | dict[str, Tree]"  # of settings


def plain(value: Tree) -> Any:
    """What YAML makes of it, whatever the types of the settings."""
    if isinstance(value, Spelled):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def text_of(value: Tree) -> str | None:
    """How a value is spelled; None for lists, mappings, and numbers of a program."""
    if isinstance(value, Spelled):
        return value.text
    return value if isinstance(value, str) else None


def read(text: str) -> Tree:
    """A YAML document; keys are texts as they stand. UserError where it is no YAML, or its aliases make much of little;
    in which line."""
    if len(text) > LONGEST:
        raise UserError(f"it is {len(text):,} characters long, and at most {LONGEST:,} are read")
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Document(loader, 2 * len(text) + REPEATED).of(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        hint = f" ({_HINT})" if isinstance(error, ScannerError | ParserError | ComposerError) else ""
        raise UserError(f"{where}{one_line(error.problem or str(error))}{hint}") from error
    except RecursionError as error:
        raise UserError("it is nested too deeply, or an alias stands within what it names") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(one_line(str(error))) from error
    finally:
        if loader is not None:
            loader.dispose()


@dataclass
class _Document:
    """The values of its nodes. An alias is its node once more, so what it repeats is counted."""

    loader: yaml.SafeLoader
    left: int  # characters that may still come

    def of(self, node: yaml.Node) -> Tree:
        self._count(node, 1 + len(node.value))
        if node.tag not in (*_VALUES, *_TEXTS, *_COLLECTIONS):
            raise _wrong(f"the tag {node.tag} has no meaning here; put a text in quotes", node)
        if isinstance(node, yaml.SequenceNode):
            return [self.of(item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        if node.tag in _TEXTS:
            return str(node.value)
        if len(node.value) > _LONGEST_NUMBER:
            raise _wrong(f"a number has more than {_LONGEST_NUMBER} characters", node)
        return Spelled(node.value, self.loader.construct_object(node))

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Tree]:
        own: dict[str, Tree] = {}
        others: dict[str, Tree] = {}  # those that `<<` names, of which the first counts
        for key, inner in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _wrong("a key is a list or a mapping", key)
            self._count(key, len(key.value))
            value = self.of(inner)
            if key.tag == f"{_TAG}merge":
                for each in value if isinstance(value, list) else [value]:
                    if not isinstance(each, dict):
                        raise _wrong("<< takes mappings", key)
                    others = each | others
            elif key.value in own:
                raise _wrong(f"the key {key.value} is there twice", key)
            else:
                own[key.value] = value
        return others | own

    def _count(self, node: yaml.Node, characters: int) -> None:
        self.left -= characters
        if self.left < 0:
            raise _wrong(f"aliases repeat more than {REPEATED:,} characters", node)


def _wrong(problem: str, node: yaml.Node) -> ConstructorError:
    return ConstructorError(problem=problem, problem_mark=node.start_mark)


def load(text: str) -> Any:
    """The plain values of a YAML document, with texts as keys; UserError as of `read`."""
    return plain(read(text))


def dump(values: Any, *, unicode: bool = False) -> str:
    """A YAML document of dicts, lists, texts and numbers, in their order; letters beyond ASCII as escapes, or as they
    are (`unicode`)."""
    return str(yaml.dump(values, Dumper=_Dumper, allow_unicode=unicode, sort_keys=False))


def load_json(text: str | bytes) -> Any:
    """The values of a JSON document; ValueError where it is none, nested too deeply, or has a key twice."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of a JSON object; ValueError where a key is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} is there twice")
    return values


class Word(Spelled):
    """What stands after the `=` of a `key=value` word. It has no quotes of YAML, since the shell has its own."""


def word(text: str) -> Word:
    """What stands after the `=` of a `key=value` word; UserError where it holds bytes that are no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{one_line(text)!r} holds bytes that are not UTF-8") from error
    try:
        value = read(text)
    except UserError:
        value = text  # a text that is no YAML; where a number is expected, its type says so
    value = value if isinstance(value, dict) else plain(value)
    return Word(text, text if value is None and text not in NULLS else value)  # to YAML `# x` is nothing as well


def created(value: object) -> Tree:
    """Nested values of a program, as `read` gives those of a file; UserError for what no file could hold."""
    if isinstance(value, Mapping):
        for key in value:
            if isinstance(key, bool) or not isinstance(key, str | int):
                raise UserError(f"the configuration holds the key {one_line(repr(key))}; keys are texts")
        return {str(key): created(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [created(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return Spelled(str(int(value)), int(value))  # a number may be a client's name
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if value is None or isinstance(value, bool | float | str | Spelled):
        return value
    raise UserError(f"the configuration holds a value that YAML cannot express: {one_line(repr(value))}")


# In a list: a text in quotes, or one that stands for itself, where a comma within brackets is its own.
_ITEM = re.compile(r"""\s*(?:'((?:[^']|'')*)'|"([^"]*)"|((?:[^,\[\]]|\[[^\[\]]*\])+?))\s*,""", re.DOTALL)


def names(text: str) -> list[str] | None:
    """The texts in `[a,b]`, each as it stands or in quotes, as one with a comma must be; None for another text."""
    inner = text.strip()
    if len(inner) < 2 or inner[0] != "[" or inner[-1] != "]":
        return None
    inner, items = inner[1:-1].strip(), []
    left = inner and f"{inner.removesuffix(',')},"
    while left:
        item = _ITEM.match(left)
        if item is None or not item[0].strip(", "):
            return None
        single, double, bare = item.groups(default="")
        items.append(single.replace("''", "'") or double or bare)
        left = left[item.end() :]
    return items


def names_of(what: str, text: str) -> list[str]:
    """The texts in `a,b`, as `names` reads them in brackets; UserError where it is no such list, with `what` it is."""
    items = names(f"[{text}]")
    if items is None:
        raise UserError(
            f"{what} is {text!r}; it takes names separated by commas, in quotes where a name has one itself"
        )
    return items
