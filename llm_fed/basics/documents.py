"""YAML and JSON, also a stranger's: every document that llm_fed reads goes through here, but for rows of data.

YAML alone decides that `no` is false, `1e5` a number and `{prompt}` a mapping. What a setting means depends on its
type, which is known later. So what YAML takes for something else than a text is kept beside its text (`Spelled`), and
`settings.coerce` chooses between the two.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.parser import ParserError
from yaml.scanner import ScannerError

from llm_fed.basics.errors import UserError, one_line

LONGEST = 2**21  # characters of a YAML document
REPEATED = 10**5  # characters that its aliases may add, where each value counts as one more
_LONGEST_NUMBER = 400

_TAG = "tag:yaml.org,2002:"
_VALUES = tuple(f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float"))
_PLAIN = tuple(f"{_TAG}{kind}" for kind in ("str", "merge", "value", "seq", "map"))  # << and = are texts as well
_ANCHOR = re.compile(r"\A&\S+\s+")
_HINT = "put a text in quotes if it begins with one of {[*&!|>@`%-?, has : or # beside a space, or brackets in a list"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the first is libyaml's
    """YAML 1.1, except that 1e5 is a number, as in YAML 1.2, and a date is a text."""


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """Puts in quotes what `_Loader` would not take for a text."""


_NUMBER = re.compile(r"[-+]?\d+(_\d+)*(\.[\d_]*)?[eE][-+]?\d+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{_TAG}float", _NUMBER, list("-+0123456789"))
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != f"{_TAG}timestamp"]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


class Spelled:
    """A value that YAML does not take for a text.

    Attributes:
        value: what YAML makes of it: null, a bool, a number, or a list or dictionary of these and texts.
    """

    def __init__(self, source: str | None, value: Any, span: slice | None = None):
        self._source, self._span, self.value = source, span, value

    @property
    def text(self) -> str | None:
        """How it is spelled; None where it takes several lines."""
        if self._source is None or self._span is None:
            return self._source
        text = _ANCHOR.sub("", self._source[self._span], count=1)
        return None if "\n" in text else text

    def __repr__(self) -> str:
        return repr(plain(self))

    def __str__(self) -> str:
        return str(self.text)


def plain(value: Any) -> Any:
    """What YAML makes of it, whatever the types of the settings."""
    if isinstance(value, Spelled):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def mapping_of(value: Any) -> dict[str, Any] | None:
    """The values by key where it is a mapping."""
    value = value.value if isinstance(value, Spelled) else value
    return value if isinstance(value, dict) else None


def read(text: str) -> Any:
    """A YAML document. Values that are no texts are `Spelled`, mappings too; the keys of these are texts as they stand.
    UserError where it is no YAML, or its aliases make much of little; in which line."""
    if len(text) > LONGEST:
        raise UserError(f"it is {len(text):,} characters long, and at most {LONGEST:,} are read")
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        return None if node is None else _Document(loader, text).of(node).value
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


class _NodeValue(NamedTuple):
    """A node's value; the characters in it, with all that its aliases repeat; where its text ends (the mark of a
    collection without brackets lies beyond comments and line breaks)."""

    value: Any
    size: int
    end: int


class _Document:
    def __init__(self, loader: Any, text: str):
        self._loader, self._text = loader, text
        self._parts: dict[yaml.Node, _NodeValue | None] = {}  # an alias is its node once more; None: being read

    def of(self, node: yaml.Node) -> _NodeValue:
        if node not in self._parts:
            self._parts[node] = None
            self._parts[node] = self._part(node)
        if (part := self._parts[node]) is None:
            raise _wrong("an alias stands within what it names", node)
        if part.size > 2 * len(self._text) + REPEATED:
            raise _wrong(f"aliases repeat more than {REPEATED:,} characters", node)
        return part

    def _part(self, node: yaml.Node) -> _NodeValue:
        start, end = node.start_mark.index, node.end_mark.index
        if node.tag.startswith(_TAG) and node.tag not in (*_VALUES, *_PLAIN):
            raise _wrong(f"the tag {node.tag} has no meaning here", node)
        if isinstance(node, yaml.ScalarNode):
            return _NodeValue(self._scalar(node), 1 + len(node.value), end)
        is_list = isinstance(node, yaml.SequenceNode)
        parts = [self.of(item if is_list else item[1]) for item in node.value]
        value = [part.value for part in parts] if is_list else _mapping(node, parts)
        size = 1 + sum(part.size for part in parts) + sum(len(key) for key in value if not is_list)
        end = parts[-1].end if parts and not node.flow_style else end
        return _NodeValue(Spelled(self._text, value, slice(start, end)), size, end)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag in _PLAIN:
            return node.value
        if node.tag not in _VALUES:  # `!x` is no tag, but the beginning of a text
            return Spelled(self._text, None, slice(node.start_mark.index, node.end_mark.index)).text
        if len(node.value) > _LONGEST_NUMBER:
            raise _wrong(f"a number has more than {_LONGEST_NUMBER} characters", node)
        return Spelled(node.value, self._loader.construct_object(node))


def _mapping(node: yaml.MappingNode, parts: list[_NodeValue]) -> dict[str, Any]:
    own: dict[str, Any] = {}
    others: dict[str, Any] = {}  # that `<<` names, of which the first counts
    for (key, _), part in zip(node.value, parts, strict=True):
        if key.tag == f"{_TAG}merge":
            given = part.value.value if isinstance(part.value, Spelled) else None
            for each in given if isinstance(given, list) else [part.value]:
                if (mapping := mapping_of(each)) is None:
                    raise _wrong("<< takes mappings", key)
                others = {**mapping, **others}
        elif not isinstance(key, yaml.ScalarNode):
            raise _wrong("a key is a list or a mapping", key)
        elif key.value in own:
            raise _wrong(f"the key {key.value} is there twice", key)
        else:
            own[key.value] = part.value
    return {**others, **own}


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
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.60} is there twice")
    return values
