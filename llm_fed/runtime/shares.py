"""Who executes what: requests of one kind divided over ranks by estimated work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from llm_fed.requests import Query, Request
from llm_fed.state import State
from llm_fed.tasks.common import Encoded, Picture


def split(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Which requests each part gets, in their order: the most expensive first, each to the part with the least so far
    (longest processing time first, Graham 1969)."""
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        part = loads.index(min(loads))
        shares[part].append(i)
        loads[part] += costs[i]
    return [sorted(share) for share in shares]


def cost(request: Request) -> float:
    """Estimated work, to be compared with that of requests of the same kind: tokens or pictures, times the states that
    they go through; of a generation the prompts, as nobody knows how long the answers will be."""
    if request.kind == "generate":
        return max(1, len(request.payload[1]))
    return max(1, _units(request.payload)) * max(1, _states(request.payload))


def _units(item: Any) -> int:
    if isinstance(item, Encoded):
        return len(item.input_ids)
    if isinstance(item, Picture):
        return 1
    if isinstance(item, Query):
        return len(item.prompt) + sum(map(len, item.options))
    if isinstance(item, list | tuple):
        return len(item) if item and isinstance(item[0], int) else sum(map(_units, item))
    if is_dataclass(item):
        return sum(_units(getattr(item, field.name)) for field in fields(item))
    return 0


def _states(item: Any) -> int:
    if isinstance(item, State):
        return 1
    if isinstance(item, list | tuple):
        return sum(map(_states, item))
    if is_dataclass(item):
        return sum(_states(getattr(item, field.name)) for field in fields(item))
    return 0
