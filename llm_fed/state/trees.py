"""Messages are trees: dictionaries and lists whose leaves are states, tensors, numbers, texts or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(message: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every part of a message that is no dictionary or list, with its place: the keys that lead to it, with dots."""
    if not isinstance(message, dict | list | tuple):
        yield path, message
        return
    for key, value in message.items() if isinstance(message, dict) else enumerate(message):
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def mapped(message: Any, change: Callable[[Any], Any]) -> Any:
    """The same tree with every leaf changed; tuples become lists."""
    if isinstance(message, dict):
        return {key: mapped(value, change) for key, value in message.items()}
    if isinstance(message, list | tuple):
        return [mapped(value, change) for value in message]
    return change(message)


def at(message: Any, path: str) -> Any:
    """The part of a message at a place that it has."""
    for key in path.split(".") if path else ():
        message = message[int(key)] if isinstance(message, list | tuple) else message[key]
    return message
