"""Who executes what: requests of one kind divided over ranks by estimated work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from llm_fed.method.requests import Fit, Generate, Query, Request
from llm_fed.state import State


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


def cost(request: Request[Any]) -> float:
    """Estimated work, to be compared with that of requests of the same type: tokens or pictures, times the states that
    they go through; of a generation the prompts, as nobody knows how long the answers will be."""
    if isinstance(request, Generate):
        return max(1, len(request.prompts))
    if isinstance(request, Fit):
        sizes = [_units(example) for example in request.examples]
        return max(1, sum(sizes[index] for indices in request.batches for index in indices)) * (
            1 + len(request.teachers)
        )
    contents = [getattr(request, field.name) for field in fields(request)]
    return max(1, _units(contents)) * max(1, _states(contents))


def _units(item: Any) -> int:
    if isinstance(item, Query):
        return len(item.prompt) + sum(map(len, item.options))
    if isinstance(item, list | tuple):
        return sum(map(_units, item))
    if texts := getattr(item, "texts", ()):
        return _units(texts)
    ids = getattr(item, "input_ids", None)
    return len(ids) if ids is not None else int(hasattr(item, "label"))


def _states(item: Any) -> int:
    if isinstance(item, State):
        return 1
    return sum(map(_states, item)) if isinstance(item, list | tuple) else 0
