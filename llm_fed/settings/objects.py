"""Objects of a Python program instead of names: what `llm_fed.run` was given as base=, data=, method= or metric=.

A configuration holds such an object as `object::NAME`. Only the program that has it can look it up, so a command that
meets this name in a run folder says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, TypeVar

from llm_fed.basics.errors import UserError

Value = TypeVar("Value")
PREFIX = "object::"  # no module, file or Hub id can begin so
# By key of a configuration: the word of `llm_fed.run`, what the object is, and how a command could have it.
_WORDS = {
    "base.name": ("base", "model", "save it with save_pretrained, and give base.name=FOLDER"),
    "task.name": ("data", "data", "write them to files, and give task.name=files task.path=FOLDER"),
    "method.name": ("method", "method", "put its class into a module, and give method=module:Class"),
    "eval.metric": ("metric", "metric", "put its function into a module, and give eval.metric=module:function"),
}
KEYS = tuple(_WORDS)  # of a configuration, where a name may stand for an object
WORD = {key: word for key, (word, _, _) in _WORDS.items()}  # the argument of `llm_fed.run`, by key
_given: ContextVar[Mapping[tuple[str, str], Any]] = ContextVar("_given", default=MappingProxyType({}))


@contextmanager
def within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Within it, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def given(objects: Mapping[tuple[str, str], Any]) -> AbstractContextManager[None]:
    """Within it, the objects by key of the configuration and the name that stands there are looked up."""
    return within(_given, {**_given.get(), **objects})


def named(thing: str) -> str:
    """What stands for an object in a configuration."""
    return f"{PREFIX}{thing}"


def is_object(name: object) -> bool:
    return isinstance(name, str) and name.startswith(PREFIX)


def find(key: str, name: str) -> Any:
    """The object that a name stands for. UserError: this program was not given it; what to do."""
    if (key, name) in _given.get():
        return _given.get()[key, name]
    word, what, instead = _WORDS.get(key, ("base", "model", "give one that has a name"))
    raise UserError(
        f"{key}={name} stands for the {what} that a Python program gave as an object, which is in no file, so no "
        f"command can load it; go on with the same call of llm_fed.run(..., {word}=...), or {instead}"
    )
