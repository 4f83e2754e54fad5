"""References in a configuration: `${rounds}` is what another key has, `${oc.env:NAME,default}` a path from the
environment. OmegaConf looks them up.

A text is a reference only if it names a key of a configuration, or the environment: `${amount}` in a template is text.
In a number or a path `${` always begins a reference, so a mistyped one is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_fed.basics.documents import Spelled
from llm_fed.basics.errors import UserError, one_line
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
    """Nested values with what their references stand for; what is `Spelled` holds none.

    Raises:
        UserError: there is no such key, or no such path.
    """
    places = set(_places(tree, ()))
    if not places:
        return tree
    try:
        whole = OmegaConf.create(_masked(tree, (), places), flags={"allow_objects": True})
        values = OmegaConf.to_container(whole, resolve=True)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).partition("\n")[0])
        raise UserError(key + one_line(reason)) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(one_line(str(error))) from error
    return dict(_replaced(tree, values, (), places))


def _children(value: Any) -> Iterator[tuple[str | int, Any]]:
    value = value.value if isinstance(value, Spelled) else value
    yield from value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()


def _places(value: Any, place: Place) -> Iterator[Place]:
    if isinstance(value, str) and is_reference(".".join(part for part in place if isinstance(part, str)), value):
        yield place
    for part, child in _children(value):
        yield from _places(child, (*place, part))


def _masked(value: Any, place: Place, places: set[Place]) -> Any:
    """For OmegaConf, to which a text with `${` is a reference and an object is none."""
    if isinstance(value, str):
        return value if place in places or "${" not in value else Spelled(value, value)
    inner = value.value if isinstance(value, Spelled) else value
    if isinstance(inner, dict):
        return {key: _masked(child, (*place, key), places) for key, child in inner.items()}
    return [_masked(child, (*place, n), places) for n, child in enumerate(inner)] if isinstance(inner, list) else value


def _replaced(value: Any, values: Any, place: Place, places: set[Place]) -> Any:
    if place in places:
        return values
    if not any(each[: len(place)] == place for each in places):
        return value
    made = {part: _replaced(child, values[part], (*place, part), places) for part, child in _children(value)}
    return made if isinstance(values, dict) else list(made.values())
