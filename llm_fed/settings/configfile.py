"""Configurations as text: YAML plus `key=value` words in, plain values out. Unknown keys and wrong types are refused.

`${rounds}` is what another key has, and `${oc.env:NAME,default}` a path from the environment; OmegaConf looks them up.
A text is a reference only if it names a key of a configuration, or the environment: `${amount}` in a template is text.
In a number or a path `${` always begins a reference, so a mistyped one is an error.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_fed.basics import documents
from llm_fed.basics.documents import List, Map, Spelled, Word, plain, text_of
from llm_fed.basics.errors import UserError, did_you_mean, one_line
from llm_fed.settings import (
    coerce,
    habits,
    hint_of,
    hints,
    is_text,
    kinds_of,
    paths,
    plugins,
    schema,
    shipped,
)
from llm_fed.settings.config import Config, check_together

Section = TypeVar("Section")
Place = tuple[str | int, ...]  # keys, and positions in lists
_REFERENCE = re.compile(r"\$\{(?:oc\.env:[^{}]*|([a-z_]+(?:\.\w+)*))\}")


def load(path: str | Path | Mapping[str, Any], words: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file or in nested values, with `key=value` words (dotted keys) laid over it, checked.
    A setting whose type is a text, or a list of texts, is taken as it stands, also where YAML would see a number. A
    word that names another method than the file replaces the file's whole `method` section. A `compare` section, which
    `llm-fed compare` reads, is left out. UserError where the file cannot be read, a key is unknown (the closest one is
    named), or a value is out of range."""
    if isinstance(path, Mapping):
        given, path = created(path), "the configuration"
    else:
        given = read(path)
    given.pop("compare", None)  # of `llm-fed compare` alone
    if isinstance(name := plain(given.get("method")), str):  # as on the command line
        given["method"] = {"name": name}
    laid_over = _tree(words, "the configuration file", "local.lr=1e-4")
    before, now = (method if isinstance(method := tree.get("method"), dict) else {} for tree in (given, laid_over))
    if before and str(now.get("name", before.get("name"))) != str(before.get("name")):
        given.pop("method")  # the settings of one method are not another's
    tree = _merged(given, laid_over)
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
    """A configuration with `key=value` words (dotted keys) laid over it, checked as by `load`; `where` is what the
    words stand after, for messages."""
    keys_of(words, where)
    try:
        laid_over = _resolved(_tree(words, where))
    except UserError as error:
        raise UserError(f"cannot use {' '.join(words)}: {error}") from error
    return from_dict(_merged(as_dict(config), laid_over))


def keys_of(words: Sequence[str], where: str) -> list[str]:
    """The dotted keys that `key=value` words set. Names and values are checked, each for itself, but not those of
    `method.*`, which need the method. UserError where a word is none, its key unknown, or its value of another type or
    out of range."""
    tree = _tree(words, where)
    section(Config, tree)
    return list(flat(tree))


def read(path: str | Path) -> dict[str, Any]:
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


def laid_under(tree: Mapping[str, Any], proposed: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values of a program with others where they have none."""
    return _merged(dict(proposed), created(tree))


def created(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values as `read` would give them; UserError for a value that no file could hold."""
    return dict(documents.created(OmegaConf.to_container(tree) if isinstance(tree, DictConfig) else tree))


def _tree(words: Sequence[str], where: str, such_as: str = "task.template=chat") -> dict[str, Any]:
    """Nested values of `key=value` words, of several with one key the last; UserError where a word is none, or is for a
    setting of a section that another word gives a plain value."""
    tree: dict[str, Any] = {}
    for index, word in enumerate(words):
        key, equals, text = word.partition("=")
        if not (key and equals):
            raise UserError(f"got {word!r} after {where}; {_joined(words, index) or f'settings look like {such_as}'}")
        if key == "method" and re.fullmatch(r"[\w+.:-]+", text):
            key = "method.name"
        value = _value(key, text)
        for part in reversed(_parts(key)):
            value = {part: value}
        tree = _merged(tree, value)
    return tree


def _joined(words: Sequence[str], index: int) -> str:
    """What to type where a setting was written with spaces, `rounds = 2`, of which the word at a place is a part."""
    first = index - 1 if index and words[index - 1].endswith("=") else index
    parts = [part for word in words[first : first + 3] for part in word.strip("=").split() if part]
    known = parts and hint_of(Config, parts[0].split(".")) is not None
    return f"type {parts[0]}={parts[1]}, without spaces" if known and len(parts) > 1 else ""


def _value(key: str, text: str) -> Any:
    """What a word gives, with its documents."""
    text = line_breaks(text) if key == "task.template" else text
    given, hint = documents.word(text), hint_of(Config, key.split("."))
    is_template = isinstance(given, Map) and hint is not None and is_text(hint)  # `{prompt}` is no mapping here
    return documents.Word(text, text) if is_template else given


def line_breaks(text: str) -> str:
    """A prompt template as it is typed in a shell, where `\\n` is a line break, and a backslash more is none."""
    return re.sub(r"(\\?)\\n", lambda match: r"\n" if match[1] else "\n", text)


def _parts(key: str) -> list[str]:
    """The names in a dotted key. The last may have dots itself where it is no field, but a client's name."""
    parts = key.split(".")
    for length in range(1, len(parts)):
        hint = hint_of(Config, parts[:length])
        if any(get_origin(kind) is dict for kind in kinds_of(hint)):
            return [*parts[:length], ".".join(parts[length:])]
    return parts


def _merged(one: Any, other: Any, kind: type | None = Config, where: str = "") -> Any:
    """Nested values with others laid over them; UserError where a setting is laid over a section that is a plain value,
    as that would be lost. `kind` is the section that the values are of."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        if kind is not None and isinstance(other, dict) and plain(one) is not None:
            raise _no_section(where, one, kind)
        return other
    known = {} if kind is None else schema(kind)
    return {
        **one,
        **{
            key: _merged(one.get(key), value, key in known and known[key].section or None, f"{where}{key}.")
            for key, value in other.items()
        },
    }


def _no_section(where: str, value: Any, section: type) -> UserError:
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


def section(kind: type[Section], tree: Any, where: str = "") -> Section:
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
            values[name] = coerce(value, hint, f"{where}{key}")
    return kind(**values)


def _settings_of_method(section: dict[str, Any]) -> dict[str, Any]:
    """A method's name and settings as plain values. Which ones are texts, its class says; no built-in one has any that
    YAML could take for something else, so only a class from outside is asked."""
    named = {"name": str(section["name"])} if "name" in section else {}
    unclear = [key for key, value in section.items() if isinstance(value, Spelled | Map | List)]
    fields: Mapping[str, Any] = {}
    if unclear and named and (":" in named["name"] or named["name"] in plugins.by_name(plugins.METHODS)):
        with suppress(UserError):  # which is said where the method is built
            kind = plugins.find("method.name", named["name"], plugins.METHODS, ())
            fields = hints(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}
    texts = {key: coerce(section[key], fields[key], f"method.{key}") for key in unclear if is_text(fields.get(key))}
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in texts.items()}
    return plain(section) | listed | named


def as_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values, as YAML and JSON want them."""

    return dataclasses.asdict(config, dict_factory=_as_section)


def _as_section(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name.removesuffix("_"): list(value) if isinstance(value, tuple) else value for name, value in fields}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return items


def check_keys(given: dict[str, Any], known: list[str], where: str) -> None:
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
    hint = hint_of(Config, key.split("."))
    if "${" in text and (key in paths.KEYS or (hint is not None and not is_text(hint))):
        return True
    named = _REFERENCE.search(text)
    return bool(named and (named[1] is None or hint_of(Config, named[1].split(".")) is not None))


def _resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Nested values with what their references stand for. UserError: there is no such key, or no such path."""
    found: list[Place] = []
    masked = _changed(tree, (), lambda index, leaf: _for_lookup(index, leaf, found))
    if not found:
        return tree
    try:
        values = OmegaConf.to_container(OmegaConf.create(plain(masked)), resolve=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).partition("\n")[0])
        raise UserError(key + one_line(reason)) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(one_line(str(error))) from error

    def looked_up(index: Place, leaf: Any) -> Any:
        value: Any = values
        for part in index if index in found else ():
            value = value[part]
        return documents.created(value) if index in found else leaf

    return dict(_changed(tree, (), looked_up))


def _for_lookup(index: Place, leaf: Any, found: list[Place]) -> Any:
    """A leaf for OmegaConf, to which each text with `${` is a reference; one that is none cannot be referred to."""
    key, text = ".".join(part for part in index if isinstance(part, str)), leaf
    if isinstance(leaf, Word):  # the shell's own, where it is no number and no path
        hint = hint_of(Config, key.split("."))
        text = leaf.text if key in paths.KEYS or hint is None or not is_text(hint) else None
    if isinstance(text, str) and is_reference(key, text):
        found.append(index)
        return text
    return "???" if "${" in (text_of(leaf) or "") else leaf


def _changed(value: Any, index: Place, change: Callable[[Place, Any], Any]) -> Any:
    """Nested values, each with what becomes of it."""
    if not isinstance(value, dict | list):
        return change(index, value)
    if isinstance(value, dict):
        made: Map | List = Map({key: _changed(inner, (*index, key), change) for key, inner in value.items()})
    else:
        made = List(_changed(inner, (*index, number), change) for number, inner in enumerate(value))
    made.text = text_of(value)
    return made
