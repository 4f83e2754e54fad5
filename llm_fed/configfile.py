"""Configurations as text: YAML plus `key=value` words in, plain values out. Unknown keys and wrong types are
refused."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from llm_fed import shipped
from llm_fed.config import Config, check
from llm_fed.errors import UserError, did_you_mean, one_line
from llm_fed.settings import coerce, hints, key_of

Section = TypeVar("Section")

# What YAML and OmegaConf raise for text that is no setting: encodings, thousands of digits, brackets in brackets.
_UNREADABLE = (YAMLError, OmegaConfBaseException, ValueError, LookupError, TypeError, AttributeError, RecursionError)


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


def load(path: str | Path | Mapping[str, Any], words: Sequence[str] = ()) -> Config:
    """The configuration in a YAML file or in nested values, with `key=value` words (dotted keys) laid over it, checked.

    A word that names another method than the file replaces the file's whole `method` section. A `compare` section,
    which `llm-fed compare` reads, is left out.

    Raises:
        UserError: the file cannot be read, a key is unknown (the closest one is named), or a value is out of range.
    """
    if isinstance(path, Mapping):
        given, path = created(path), "the configuration"
    else:
        given = read(path)
    given.pop("compare", None)  # of `llm-fed compare` alone
    for word in words:
        if "=" not in word:
            raise UserError(f"got {word!r} after the configuration file; settings look like local.lr=1e-4")
    try:
        laid_over = OmegaConf.from_dotlist([_spelled_out(word) for word in words])
        if _another_method(given, laid_over):
            given.pop("method")  # the settings of one method are not another's
        laid = OmegaConf.merge(given, laid_over)
        if isinstance(laid, DictConfig) and (missing := sorted(OmegaConf.missing_keys(laid))):
            raise UserError(
                f"{path} does not set {' and '.join(missing)}; give {' '.join(f'{key}=...' for key in missing)}"
            )
        merged = OmegaConf.to_container(laid, resolve=True)
    except _UNREADABLE as error:
        raise UserError(f"cannot apply {list(words)} to {path}: {one_line(str(error))}") from error
    if not isinstance(merged, dict):
        raise UserError(f"{path} holds {type(merged).__name__}, not a mapping of settings")
    return from_dict({str(key): value for key, value in merged.items()})


def overlay(config: Config, words: Sequence[str], where: str) -> Config:
    """A configuration with `key=value` words (dotted keys) laid over it, checked.

    Args:
        where: what the words stand after, for messages.

    Raises:
        UserError: see `load`.
    """
    keys_of(words, where)
    words = [_spelled_out(word) for word in words]
    try:
        tree: Any = OmegaConf.to_container(
            OmegaConf.merge(OmegaConf.create(as_dict(config)), OmegaConf.from_dotlist(words)), resolve=True
        )
    except _UNREADABLE as error:
        raise UserError(f"cannot use {' '.join(words)}: {one_line(str(error))}") from error
    return from_dict(tree)


def keys_of(words: Sequence[str], where: str) -> list[str]:
    """The dotted keys that `key=value` words set. Their names and values are checked, each for itself, but not
    those of `method.*`, which need the method.

    Raises:
        UserError: a word is none, its key is unknown, or its value is of another type or out of range.
    """
    for word in words:
        if "=" not in word.lstrip("="):
            raise UserError(f"got {word!r} after {where}; settings look like task.template=chat")
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([_spelled_out(word) for word in words]))
    except _UNREADABLE as error:
        raise UserError(f"cannot use {' '.join(words)}: {one_line(str(error))}") from error
    _build(Config, tree, "")
    return list(flat(tree))


def read(path: str | Path) -> DictConfig:
    """A YAML file of settings as it stands, unchecked; one that llm_fed ships may be given by its name alone.

    Raises:
        UserError: the file cannot be read, or is no mapping.
    """
    try:
        given = OmegaConf.load(shipped.find(path))
    except (OSError, *_UNREADABLE) as error:
        raise UserError(f"cannot read {path}: {one_line(str(error))}") from error
    if not isinstance(given, DictConfig):
        raise UserError(f"{path} holds a list, not a mapping of settings")
    return given


def created(tree: Mapping[str, Any]) -> DictConfig:
    """Nested values as `read` would give them.

    Raises:
        UserError: a value that no file could hold.
    """
    try:
        return OmegaConf.create(dict(tree))
    except OmegaConfBaseException as error:
        raise UserError(
            f"the configuration holds a value that YAML cannot express: {' '.join(str(error).split())}"
        ) from error


def _another_method(given: DictConfig, laid_over: DictConfig) -> bool:
    before, now = given.get("method") or {}, laid_over.get("method") or {}
    return bool(before) and "name" in now and now["name"] != before.get("name")


def _spelled_out(word: str) -> str:
    """`method=fedit` means `method.name=fedit`."""
    return word.replace("method=", "method.name=", 1) if re.fullmatch(r"method=[\w+.:-]+", word) else word


def from_dict(tree: dict[str, Any]) -> Config:
    """A checked configuration from nested plain values.

    Raises:
        UserError: see `load`.
    """
    config = _build(Config, tree, "")
    check(config)
    return config


def as_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested plain values, as YAML and JSON want them."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {key_of(f.name): plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value

    return plain(config)


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted key."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return items


def check_keys(given: dict[str, Any], known: list[str], where: str) -> None:
    """Refuse keys that are not `known`, naming the closest one."""
    for key in given:
        if key not in known:
            raise UserError(f"unknown key {where}{key}{did_you_mean(key, known)}; known: {', '.join(known) or 'none'}")


def _build(kind: type[Section], tree: Any, where: str) -> Section:
    if not isinstance(tree, dict):
        raise UserError(f"{where.rstrip('.')} is {tree!r}; it takes a mapping of settings")
    fields = {key_of(name): (name, hint) for name, hint in hints(kind).items()}
    check_keys(tree, list(fields), where)
    values: dict[str, Any] = {}
    for key, value in tree.items():
        name, hint = fields[key]
        parts = [part for part in (hint, *get_args(hint)) if isinstance(part, type)]
        section = next(filter(dataclasses.is_dataclass, parts), None)
        if section is not None and not (value is None and NoneType in get_args(hint)):
            values[name] = _build(section, value, f"{where}{key}.")
        elif get_origin(hint) is dict and not isinstance(value, dict):
            raise UserError(f"{where}{key} is {value!r}; it takes a mapping of settings")
        else:
            values[name] = coerce(value, hint, f"{where}{key}")
    return kind(**values)
