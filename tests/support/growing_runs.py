"""What the sites of runs over changing data are given, taken down as they are built."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import growing
from image_runs import Killer

from llm_fed.bench import build

__all__ = ["Killer", "built"]
Rows = set[tuple[str, ...]]


@dataclass
class Built:
    """What the sites of one experiment were given."""

    trained: Rows = field(default_factory=set)
    held: Rows = field(default_factory=set)


@contextmanager
def built() -> Iterator[list[Built]]:
    """Each experiment that is built meanwhile."""
    real, found = build.build, []

    def taken_down(*given: Any, **named: Any) -> Any:
        clients, server, schedule = real(*given, **named)
        one = Built()
        for site in (*clients.values(), server):
            one.trained |= keys(getattr(site.data.train, "examples", site.data.train))
            for queries in site.data.queries.values():
                one.held |= keys(getattr(queries, "examples", queries))
        found.append(one)
        return clients, server, schedule

    build.build = taken_down
    try:
        yield found
    finally:
        build.build = real


def keys(examples: Any) -> Rows:
    return {growing.key(str(example.prompt), *example.answers) for example in examples}
