"""What carries orders to nodes, and what may be believed of their replies."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm_fed.messages.wire import WireError, unpack


@dataclass(frozen=True)
class Reply:
    """What came back for one order; `error` where nothing useful did."""

    content: Mapping[str, Any]
    answer: bytes = b""

    @property
    def error(self) -> str:
        return str(self.content.get("error", ""))

    @property
    def score(self) -> float | None:
        """From 0 to 100; None where there is none that could be one."""
        score = self.content.get("score")
        if self.error or not isinstance(score, int | float) or not 0 <= score <= 100:  # as NaN is not
            return None
        return float(score)

    @property
    def loss(self) -> float | None:
        """None where there is none that could be one."""
        loss = self.content.get("loss")
        if self.error or not isinstance(loss, int | float) or not 0 <= loss <= sys.float_info.max:
            return None
        return float(loss)

    @property
    def clients(self) -> list[str]:
        """The names in it."""
        names = self.content.get("clients")
        return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []

    @property
    def recipe(self) -> dict[str, Any]:
        """What a merging method found out at the client."""
        recipe = self.content.get("recipe")
        return recipe if isinstance(recipe, dict) else {}


class Link(Protocol):
    """Carries orders to nodes and brings back their replies."""

    def nodes(self) -> Collection[int]:
        """Those that are there now."""
        ...

    def send(self, orders: Sequence[tuple[int, Mapping[str, Any], bytes]], patience: float) -> list[str | None]:
        """An id for each order (None: it cannot be sent); no reply is awaited longer than `patience` seconds."""
        ...

    def receive(self, ids: Collection[str]) -> dict[str, Reply]:
        """The replies that have come by now, by the id of their order; each is given out once."""
        ...


@dataclass(frozen=True)
class Asked:
    """An order to train on its way, and what its answer must be like."""

    client: str
    round: int
    ask: str
    since: float
    down: int  # bytes
    expected: Any  # skeleton of the upload
    most: int  # bytes that the upload may have


def flaw_of(asked: Asked, reply: Reply) -> str:
    """What makes an answer unusable before its content is looked at; empty where nothing does."""
    content = reply.content
    if content.get("ask") != asked.ask:
        return "it answers another order than the last one (an old answer, sent again?)"
    if len(reply.answer) > asked.most:
        return f"it has {len(reply.answer):,} bytes, and at most {asked.most:,} were expected"
    examples, loss = content.get("examples"), content.get("loss", 0.0)
    if not isinstance(examples, int) or isinstance(examples, bool) or examples < 1:
        return f"its number of examples is {examples!r}"
    if not isinstance(loss, int | float) or not math.isfinite(loss):
        return f"its loss is {loss!r}"
    if not isinstance(content.get("steps", 0), int):
        return f"its number of steps is {content['steps']!r}"
    try:
        unpack(reply.answer)
    except WireError as error:
        return str(error)
    return ""
