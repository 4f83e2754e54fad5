"""A method's fields as settings of a configuration: names, defaults, types, and whether a class has such fields."""

from __future__ import annotations

import re
import sys
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from llm_fed.errors import UserError
from llm_fed.method import Method
from llm_fed.plugins import path_of

TYPES = ("bool", "int", "float", "str", "tuple[int, ...]", "tuple[str, ...]", "None")  # that a configuration can give


def fields_of(kind: type[Method]) -> dict[str, Field]:
    """The fields that are settings, by name."""
    return {field.name: field for field in fields(kind) if field.init}


def defaults_of(kind: type[Method]) -> dict[str, Any]:
    """The values that settings have by themselves; those are missing that must be given."""
    own = fields_of(kind)
    made = {name: field.default_factory() for name, field in own.items() if field.default_factory is not MISSING}
    return {name: field.default for name, field in own.items() if field.default is not MISSING} | made


def annotation(field: Field) -> str:
    """A field's type as text, `float | None`, also where its module does not postpone the evaluation of annotations."""
    return _text(field.type)


def check(where: str, found: Any) -> None:
    """Refuse what is no method, or one whose fields are no settings.

    Args:
        where: who names it, for messages.

    Raises:
        UserError: what is wrong, and how it is written.
    """
    if not (isinstance(found, type) and issubclass(found, Method)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"{found!r:.60}"
        raise UserError(f"{where} is {what}; it must be a class that derives from llm_fed.method.Method")
    if _at(path_of(found)) is not found:  # by this name a checkpoint's run and the ranks of a launch find it again
        raise UserError(f"{where} is not found as {path_of(found)}; define the class at the top of its module")
    if "__dataclass_params__" not in vars(found):  # Method's own would be inherited
        raise UserError(
            f"{where}: {found.__name__} is no dataclass of its own, so that its settings are not seen; write "
            "@dataclass(frozen=True) above it"
        )
    for name, field in fields_of(found).items():
        if not {part.strip() for part in annotation(field).split("|")} <= {*TYPES}:
            raise UserError(
                f"{where}: its setting {name} is of the type {annotation(field)}; settings can be "
                f"{', '.join(TYPES)}, or several of these with | between"
            )


def _at(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _text(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(map(_text, get_args(kind)))
    if isinstance(kind, type) and get_origin(kind) is None:
        return "None" if kind is NoneType else kind.__name__
    return re.sub(r"^(?:typing\.)?Optional\[(.*)\]$", r"\1 | None", str(kind))
