"""A method's fields as settings of a configuration: names, defaults, types, and whether a class has such fields."""

from __future__ import annotations

import sys
from dataclasses import MISSING, fields
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.method import Method
from llm_fed.method.merge import kind_of
from llm_fed.settings import PLAIN, hints, takes_plain
from llm_fed.settings.plugins import path_of


def fields_of(kind: type[Method]) -> dict[str, Any]:
    """The types of the fields that are settings, by name, with their ranges (`settings.hints`)."""
    types = hints(kind)
    return {field.name: types[field.name] for field in fields(kind) if field.init}


def defaults_of(kind: type[Method]) -> dict[str, Any]:
    """The values that settings have by themselves; those are missing that must be given."""
    own = [field for field in fields(kind) if field.init]
    made = {field.name: field.default_factory() for field in own if field.default_factory is not MISSING}
    return {field.name: field.default for field in own if field.default is not MISSING} | made


def check(where: str, candidate: Any, *, is_object: bool = False) -> None:
    """Refuse what is no method, or one whose fields are no settings.

    Args:
        where: who names it, for messages.
        is_object: whether a program has it as an object, which need not be found by a name.

    Raises:
        UserError: what is wrong, and how it is written.
    """
    if not (isinstance(candidate, type) and issubclass(candidate, Method)):
        what = f"the class {candidate.__name__}" if isinstance(candidate, type) else f"{candidate!r:.60}"
        raise UserError(
            f"{where} is {what}; it must be a class that derives from llm_fed.method.Method, or a function under "
            "@Merger(...) of llm_fed.method.merge"
        )
    # By this name a checkpoint's run and the ranks of a launch find it again.
    if not is_object and kind_of(_at(path_of(candidate))) is not candidate:
        raise UserError(f"{where} is not found as {path_of(candidate)}; define it at the top level of its module")
    if "__dataclass_params__" not in vars(candidate):  # Method's own would be inherited
        raise UserError(
            f"{where}: {candidate.__name__} is not a dataclass itself, so its settings are not read; write "
            "@dataclass(frozen=True) above it"
        )
    for name, hint in fields_of(candidate).items():
        if not takes_plain(hint):
            kind = hint.__name__ if type(hint) is type else hint  # a list[int] has the name of a list
            raise UserError(
                f"{where}: its setting {name} is of the type {kind}; settings can be "
                f"{PLAIN}, or several of these with | between"
            )


def _at(path: str) -> Any:
    module, _, name = path.partition(":")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
