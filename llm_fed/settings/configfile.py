"""Configurations as text: YAML plus `key=value` words in, plain values out. Unknown keys and wrong types are refused.

`${rounds}` is what another key has, and `${oc.env:NAME,default}` a path from the environment; OmegaConf looks them up.
A text is a reference only if it names a key of a configuration, or the environment: `${amount}` in a template is text.
In a number or a path `${` always begins a reference, so a mistyped one is an error.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_fed.basics import documents
from llm_fed.basics.documents import Spelled, Tree, Word, plain, text_of
from llm_fed.basics.errors import UserError, did_you_mean, one_line
from llm_fed.settings import coerce, habits, hint_of, hints, is_text, paths, plugins, schema, shipped
from llm_fed.settings.config import Config, check_together

Section = TypeVar("Section")
Index = tuple[str | int, ...]  # keys, and positions in lists
_REFERENCE = re.compile(r"\$\{(?:oc\.env:[^{}]*|([a-z_]+(?:\.\w+)*))\}")


def load(path: str | Path | Mapping[str, Any], words: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file or in nested values, over which `key=value` words (dotted keys) take precedence,
    checked. A text, or a list of texts, is taken as it stands, also where YAML would see a number. A word that names
    another method than the file replaces the file's whole `method` section. A `compare` section, which `llm-fed
    compare` reads, is left out. UserError where the file cannot be read, a key is unknown (the closest one is named),
    or a value is out of range."""
    if isinstance(path, Mapping):
        given, path = created(path), "the configuration"
    else:
        given = read(path)
    given.pop("compare", None)  # of `llm-fed compare` alone
    if isinstance(name := plain(given.get("method")), str):  # as on the command line
        given["method"] = {"name": name}
    preferred = _tree(words, "the configuration file", "local.lr=1e-4")
    before, now = (method if isinstance(method := tree.get("method"), dict) else {} for tree in (given, preferred))
    if before and str(now.get("name", before.get("name"))) != str(before.get("name")):
        given.pop("method")  # the settings of one method are not another's
    tree = merged(given, preferred)
    if missing := sorted(key for key, value in flat(tree).items() if value == "???"):
        keys_of(words, "the configuration file")  # whose mistakes come first
        raise UserError(
            f"{path} does not set {' and '.join(missing)}; give {' '.join(f'{key}=...' for key in missing)}"
        )
    try:
        tree = _resolved(tree)
    except UserError as error:
        raise UserError(f"cannot use {' '.join([str(path), *words])}: {error}") from error
    return from_dict(tree)


def overlay(config: Config, words: Sequence[str], where: str) -> Config:
    """A configuration with `key=value` words (dotted keys) that take precedence, checked as by `load`; `where` is what
    the words stand after, for messages."""
    keys_of(words, where)
    try:
        preferred = _resolved(_tree(words, where))
    except UserError as error:
        raise UserError(f"cannot use {' '.join(words)}: {error}") from error
    return from_dict(merged(as_dict(config), preferred))


def keys_of(words: Sequence[str], where: str) -> list[str]:
    """The dotted keys that `key=value` words set. Names and values are checked, each for itself, but not those of
    `method.*`, which need the method. UserError where a word is none, its key unknown, or its value of another type or
    out of range."""
    tree = _tree(words, where)
    section(Config, tree)
    return list(flat(tree))


def read(path: str | Path) -> dict[str, Tree]:
    """A YAML file of settings as it stands, unchecked, see `documents.read`; one that llm_fed ships may be given by its
    name alone. UserError where it cannot be read, or is no mapping."""
    file = shipped.find(path)
    try:
        given = documents.read(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path}: {one_line(str(error))}") from error
    except UserError as error:
        raise UserError(f"cannot read {path}: {error}") from error
    if given is not None and not isinstance(given, dict):
        raise UserError(f"{path} holds a {type(plain(given)).__name__}, not a mapping of settings")
    return {key: value for key, value in (given or {}).items() if key != "format"}  # of the config.yaml of a run folder


def created(tree: Mapping[str, Any]) -> dict[str, Tree]:
    """Nested values as `read` would give them; UserError for a value that no file could hold."""
    made = documents.created(OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else tree)
    assert isinstance(made, dict)
    return made


def _tree(words: Sequence[str], where: str, such_as: str = "task.template=chat") -> dict[str, Tree]:
    """Nested values of `key=value` words, of several with one key the last; UserError where a word is none, or is for a
    setting of a section that another word gives a plain value."""
    tree: dict[str, Tree] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise UserError(f"got {word!r} after {where}; settings look like {such_as}, without spaces")
        if key == "method" and re.fullmatch(r"[\w+.:-]+", text):
            key = "method.name"
        *sections, last = key.split(".")
        if key == "task.template":  # typed in a shell, where `\n` is a line break, and a backslash more is none
            text = re.sub(r"(\\?)\\n", lambda match: r"\n" if match[1] else "\n", text)
        given = documents.word(text)
        is_section = isinstance(given.value, dict) and not _may_be_text(key)
        setting: dict[str, Tree] = {last: given.value if is_section else given}
        for section in reversed(sections):
            setting = {section: setting}
        tree = merged(tree, setting)
    return tree


def merged(
    one: Mapping[str, Tree], other: Mapping[str, Tree], kind: type | None = Config, where: str = ""
) -> dict[str, Tree]:
    """Nested values with others that take precedence; UserError where a setting would replace a plain value that stands
    for its whole section. `kind` is the section that the values are of."""
    known = {} if kind is None else schema(kind)
    tree = dict(one)
    for key, value in other.items():
        before, inner = one.get(key), known[key].section if key in known else None
        if isinstance(before, dict) and isinstance(value, dict):
            tree[key] = merged(before, value, inner, f"{where}{key}.")
        elif inner is not None and isinstance(value, dict) and plain(before) is not None:
            raise _no_section(f"{where}{key}.", before, inner)
        else:
            tree[key] = value
    return tree


def _no_section(where: str, value: Tree, section: type) -> UserError:
    key, named = where.rstrip("."), "name" in hints(section) and isinstance(plain(value), str)
    example = f", such as {key}.name={plain(value)}" if named else ""
    return UserError(f"{key} is {plain(value)!r}; it takes a mapping of settings{example}")


def from_dict(tree: dict[str, Any]) -> Config:
    """A checked configuration from nested values; UserError as of `load`."""
    if isinstance(method := tree.get("method"), dict):
        tree = {**tree, "method": _settings_of_method(method)}
    config = section(Config, tree)
    check_together(config)
    return config


def section(kind: type[Section], tree: Tree, where: str = "") -> Section:
    """A dataclass of settings from nested values, as `read` gives them; UserError as of `load`. `where`: the prefix of
    its keys in messages."""
    if not isinstance(tree, dict):
        raise _no_section(where, tree, kind)
    fields = schema(kind)
    check_keys(tree, list(fields), where)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name, hint, inner = fields[key]
        absent = plain(value) is None and NoneType in get_args(hint)
        if inner is not None and not absent:
            values[name] = section(inner, value, f"{where}{key}.")
        elif get_origin(hint) is dict and not isinstance(value, dict):
            raise UserError(f"{where}{key} is {plain(value)!r}; it takes a mapping of settings")
        else:
            if isinstance(value, dict) and get_origin(hint) is not dict:
                value = flat(value)  # clients' names may have dots
            values[name] = coerce(value, hint, f"{where}{key}")
    return kind(**values)


def _settings_of_method(section: dict[str, Tree]) -> dict[str, Any]:
    """A method's name and settings as plain values. Which ones are texts, its class says; no built-in one has any that
    YAML could take for something else, so only a class from outside is asked."""
    named = {"name": text_of(section["name"]) or str(section["name"])} if "name" in section else {}
    unclear = [key for key, value in section.items() if key != "name" and isinstance(value, Spelled | list)]
    fields: Mapping[str, Any] = {}
    if unclear and named and (":" in named["name"] or named["name"] in plugins.names(plugins.METHODS)):
        with suppress(UserError):  # which is said where the method is built
            kind = plugins.find("method.name", named["name"], plugins.METHODS, ())
            fields = hints(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}
    texts = {key: coerce(section[key], fields[key], f"method.{key}") for key in unclear if is_text(fields.get(key))}
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in texts.items()}
    return plain(section) | listed | named


def as_dict(section: Any) -> dict[str, Any]:
    """The configuration, or a section, as nested plain values, as YAML and JSON want them."""
    tree = {}
    for key, (name, _, _) in schema(type(section)).items():
        value = getattr(section, name)
        if dataclasses.is_dataclass(value):
            value = as_dict(value)
        tree[key] = list(value) if isinstance(value, tuple) else copy.deepcopy(value)
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return items


def check_keys(given: Mapping[str, Tree], known: list[str], where: str) -> None:
    """Refuse keys that are not `known`, naming what to type in their place, or the closest one."""
    for key, value in given.items():
        if key not in known:
            value = text_of(value) or value
            if advice := habits.instead(f"{where}{key}", value, flat(as_dict(Config()))):
                raise UserError(f"unknown key {where}{key}; type {advice}")
            raise UserError(f"unknown key {where}{key}{did_you_mean(key, known)}; known: {', '.join(known) or 'none'}")


def _variable(name: str, default: str | None = "") -> str | None:
    """`${oc.env:NAME,default}`: a path from the environment. Other values are refused, since a file of settings may be
    somebody else's, and what it reads is stored in the run folder: no token is a file or folder that exists."""
    value = os.environ.get(name)
    if value is None and default != "":
        return default
    if value is None or not Path(value).exists():
        raise ValueError(f"{name} is not an existing path, and only paths are read from the environment")
    return value


# OmegaConf 2.4 warns of the one, and 2.3 means something older by the other.
if "replace" in signature(OmegaConf.register_resolver).parameters:
    OmegaConf.register_resolver("oc.env", _variable, replace=True)
else:
    OmegaConf.register_new_resolver("oc.env", _variable, replace=True)


def is_reference(key: str, text: str) -> bool:
    """Whether a text that is the value of this dotted key is looked up."""
    if "${" in text and (key in paths.KEYS or not _may_be_text(key)):
        return True
    named = _REFERENCE.search(text)
    return bool(named and (named[1] is None or hint_of(Config, named[1].split(".")) is not None))


def _may_be_text(key: str) -> bool:
    hint = hint_of(Config, key.split("."))
    return hint is None or is_text(hint)


def _resolved(tree: dict[str, Tree]) -> dict[str, Tree]:
    """Nested values with what their references stand for. UserError: there is no such key, or no such path."""
    leaves = {index: leaf for index, leaf in _leaves(tree) if "${" in (text_of(leaf) or "")}
    found = {index: text_of(leaf) for index, leaf in leaves.items() if _is_reference(index, leaf)}
    if not found:
        return tree
    masked = plain(tree)
    for index in leaves:  # to OmegaConf each is a reference; one that is none cannot be referred to
        _at(masked, index[:-1])[index[-1]] = found.get(index, "???")
    try:
        values = OmegaConf.to_container(OmegaConf.create(masked), resolve=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).partition("\n")[0])
        raise UserError(key + one_line(reason)) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(one_line(str(error))) from error
    for index in found:
        _at(tree, index[:-1])[index[-1]] = documents.created(_at(values, index))
    return tree


def _leaves(tree: Tree, index: Index = ()) -> Iterator[tuple[Index, Tree]]:
    if not isinstance(tree, dict | list):
        yield index, tree
        return
    for key, inner in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(inner, (*index, key))


def _is_reference(index: Index, leaf: Tree) -> bool:
    key = ".".join(part for part in index if isinstance(part, str))
    if isinstance(leaf, Word) and key not in paths.KEYS and _may_be_text(key):
        return False  # the shell has its own variables
    return is_reference(key, text_of(leaf) or "")


def _at(tree: Any, index: Index) -> Any:
    for part in index:
        tree = tree[part]
    return tree
