"""References in a configuration: `${rounds}` is what another key has, `${oc.env:NAME,default}` a path from the
environment. OmegaConf looks them up.

A text is a reference only if it names a key of a configuration, or the environment: `${amount}` in a template is text.
In a number or a path `${` always begins a reference, so a mistyped one is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_fed.basics.documents import List, Map, plain, text_of
from llm_fed.basics.errors import UserError, one_line
from llm_fed.basics.spelling import Word, created
from llm_fed.settings import hint_of, is_text, paths
from llm_fed.settings.config import Config

Place = tuple[str | int, ...]  # keys, and positions in lists

_REFERENCE = re.compile(r"\$\{(?:oc\.env:[^{}]*|([a-z_]+(?:\.\w+)*))\}")


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


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """Nested values with what their references stand for.

    Raises:
        UserError: there is no such key, or no such path.
    """
    found: list[Place] = []
    masked = _changed(tree, (), lambda place, leaf: _for_lookup(place, leaf, found))
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

    def looked_up(place: Place, leaf: Any) -> Any:
        value: Any = values
        for part in place if place in found else ():
            value = value[part]
        return created(value) if place in found else leaf

    return dict(_changed(tree, (), looked_up))


def _for_lookup(place: Place, leaf: Any, found: list[Place]) -> Any:
    """A leaf for OmegaConf, to which each text with `${` is a reference; one that is none cannot be referred to."""
    key, text = ".".join(part for part in place if isinstance(part, str)), leaf
    if isinstance(leaf, Word):  # the shell's own, where it is no number and no path
        hint = hint_of(Config, key.split("."))
        text = leaf.text if key in paths.KEYS or hint is None or not is_text(hint) else None
    if isinstance(text, str) and is_reference(key, text):
        found.append(place)
        return text
    return "???" if "${" in (text_of(leaf) or "") else leaf


def _changed(value: Any, place: Place, change: Callable[[Place, Any], Any]) -> Any:
    """Nested values, each with what becomes of it."""
    if not isinstance(value, dict | list):
        return change(place, value)
    if isinstance(value, dict):
        made: Map | List = Map({key: _changed(inner, (*place, key), change) for key, inner in value.items()})
    else:
        made = List(_changed(inner, (*place, number), change) for number, inner in enumerate(value))
    made.text = text_of(value)
    return made
