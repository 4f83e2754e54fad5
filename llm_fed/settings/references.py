"""References in a configuration: `${rounds}` is what another key has, `${oc.env:NAME,default}` a path from the
environment. OmegaConf looks them up.

A text is a reference only if it names a key of a configuration, or the environment: `${amount}` in a template is text.
In a number or a path `${` always begins a reference, so a mistyped one is an error.
"""

from __future__ import annotations

import os
import re
from inspect import signature
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llm_fed.basics.errors import UserError, one_line
from llm_fed.basics.spelling import Spelled
from llm_fed.settings import hint_of, is_text, paths
from llm_fed.settings.config import Config

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
    """Nested values with what their references stand for; UserError where there is no such key or path."""
    if "${" not in repr(tree):
        return tree
    try:
        whole = OmegaConf.create(_opened(tree, ""), flags={"allow_objects": True})
        values: Any = OmegaConf.to_container(whole, resolve=True)
        return dict(values)
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if error.full_key else ""
        reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).partition("\n")[0])
        raise UserError(key + one_line(reason)) from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(one_line(str(error))) from error


def _opened(value: Any, key: str) -> Any:
    """The value of a dotted key for OmegaConf, to which a text with `${` is a reference and an object is none, so that
    lists without references stay `Spelled`."""
    if isinstance(value, str):
        return Spelled(value, value) if "${" in value and not is_reference(key, value) else value
    inner = value.value if isinstance(value, Spelled) else value
    if isinstance(inner, dict):
        return {name: _opened(child, f"{key}.{name}" if key else name) for name, child in inner.items()}
    return [_opened(child, key) for child in inner] if isinstance(inner, list) and "${" in repr(inner) else value
