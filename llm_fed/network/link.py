"""What carries orders to nodes, and what may be believed of their replies."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from llm_fed.basics.errors import one_line
from llm_fed.scoring.rules import NAMES
from llm_fed.scoring.scores import BESIDE, Summary, summarize
from llm_fed.state.roles import Given
from llm_fed.state.wire import WireError, unpack

_COUNTS = range(2**53)  # whole numbers that every float holds
_LARGEST = 3.4e38  # that a loss can be: training computes in float32
BOUNDS = -100, 100  # of a score: correlations may be negative
_LONGEST = 65536  # characters of a recipe, written as JSON


@dataclass(frozen=True)
class Reply:
    """What came back for one order; `error` where nothing useful did. `content` may hold anything that JSON can, and is
    to be read through what stands here."""

    content: Mapping[str, Any]
    answer: bytes = b""

    @property
    def error(self) -> str:
        """In one printable line; empty where there is none."""
        return self._text("error")

    @property
    def failed(self) -> str:
        """Why the client's own work at the end failed; empty where it did not."""
        return self._text("failed")

    @property
    def score(self) -> float | None:
        """From -100 to 100; None where there is none that could be one."""
        return self.number("score", *BOUNDS)

    @property
    def loss(self) -> float | None:
        """None where there is none that could be one."""
        return self.number("loss", 0, _LARGEST)

    @property
    def beside(self) -> dict[str, float]:
        """What was measured beside the score, by name, as far as it can be that."""
        given = self.content.get("beside")
        if self.error or not isinstance(given, dict):
            return {}
        return {
            name: float(value) for name, value in given.items()
            if name in BESIDE and type(value) in (int, float) and abs(value) <= _LARGEST
        }  # fmt: skip

    @property
    def rule(self) -> tuple[str, float] | None:
        """The name and the score of its best rule that trains nothing; None where there is none that could be one."""
        name, score = self.content.get("rule"), self.number("rule_score", *BOUNDS)
        return None if score is None or name not in NAMES else (str(name), score)

    @property
    def of_base(self) -> Reply:
        """What the base is worth on its examples, to be read like a reply of its own."""
        given = self.content.get("of_base")
        return Reply(given if isinstance(given, dict) and not self.error else {})

    @property
    def tested(self) -> int:
        """How many test examples it has; 0 where it does not say so."""
        return int(self.number("tested", 0, 2**31) or 0)

    @property
    def warned(self) -> dict[str, Any]:
        """Figures by the kind of a warning, not checked any further."""
        given = self.content.get("warnings")
        if not isinstance(given, dict) or self.error or len(repr(given)) > _LONGEST:
            return {}
        return given

    @property
    def clients(self) -> dict[str, int]:
        """By the name of each client that it says it has, the number of its training examples."""
        given = self.content.get("clients")
        clients = given.items() if isinstance(given, dict) else ()
        return {name: number for name, number in clients if name and one_line(name) == name and _counts(number)}

    @property
    def certificates(self) -> dict[str, tuple[str, str]]:
        """By client what says that a key is its own, which other clients check."""
        given = self.content.get("certificates")
        pairs = given.items() if isinstance(given, dict) and not self.error else ()
        return {
            name: (pair[0], pair[1])
            for name, pair in pairs
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) for half in pair)
        }

    def names(self, key: str) -> list[str]:
        """The names in this place that could be those of clients."""
        given = self.content.get(key)
        names = given if isinstance(given, list) and not self.error else []
        return [name for name in names if isinstance(name, str) and name and one_line(name) == name]

    @property
    def unscored(self) -> bool:
        """Whether it says that the client has no example to be scored on."""
        return not self.error and self.content.get("score", self) is None

    @property
    def recipe(self) -> dict[str, Any]:
        """What a merging method found out at the client, its texts in printable lines. ValueError: it cannot be one."""
        recipe = self.content.get("recipe")
        try:
            if isinstance(recipe, dict) and len(json.dumps(recipe, allow_nan=False)) <= _LONGEST:
                return _printable(recipe)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its recipe is malformed: {type(error).__name__}") from error
        raise ValueError("its recipe is malformed, or too long")

    def number(self, key: str, least: float, most: float) -> float | None:
        """The number in this place, from `least` to `most`; None where there is none."""
        value = self.content.get(key)
        if self.error or not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if least <= value <= most else None  # as NaN is not

    def _text(self, key: str) -> str:
        text = self.content.get(key, "")
        return one_line(text) if isinstance(text, str) else f"what it says as {key} is no text"


def _counts(value: Any) -> bool:
    """Whether it can be a number of examples."""
    return type(value) is int and value in _COUNTS and value > 0


def _printable(node: Any) -> Any:
    if isinstance(node, dict):
        return {one_line(key): _printable(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_printable(item) for item in node]
    return one_line(node) if isinstance(node, str) else node


def summary_of(metric: str, replies: Mapping[str, Reply]) -> Summary | None:
    """Of the scores, losses and figures beside them that clients say; None where nobody has a score."""
    scores = {name: reply.score for name, reply in replies.items() if reply.score is not None}
    losses = {name: replies[name].loss for name in scores if "loss" in replies[name].content}
    unscored = [name for name, reply in replies.items() if reply.unscored]
    beside: dict[str, dict[str, float]] = {}
    for name in scores:
        for key, value in replies[name].beside.items():
            beside.setdefault(key, {})[name] = value
    return summarize(metric, scores, losses, unscored, beside) if scores else None


class Link(Protocol):
    """Carries orders to nodes and brings back their replies."""

    def nodes(self) -> Mapping[int, str]:
        """Those that are there now, by their id the name under which the operator registered their key."""
        ...

    def send(self, orders: Sequence[tuple[int, Mapping[str, Any], bytes]], patience: float) -> list[str | None]:
        """An id for each order (None: it cannot be sent); no reply is awaited longer than `patience` seconds."""
        ...

    def receive(self, ids: Collection[str]) -> dict[str, Reply]:
        """The replies that have come by now, by the id of their order; each is given out once."""
        ...


@dataclass(frozen=True)
class PendingOrder:
    """An order to train on its way, and what its answer must be like."""

    client: str
    round: int
    ask: str
    since: float
    down: int  # bytes
    most: int  # bytes that the upload may have
    examples: int  # that the client said it has when it joined
    given: Given  # what the upload must be like


def flaw_of(requested: PendingOrder, reply: Reply) -> str:
    """What makes an answer unusable, but for its numbers, in one line; empty where nothing does."""
    try:
        return one_line(_flaw_of(requested, reply))
    except Exception as error:  # of any kind: whatever one client answers ends that answer alone
        return one_line(f"it cannot be read: {type(error).__name__}: {error}")


def _flaw_of(requested: PendingOrder, reply: Reply) -> str:
    content = reply.content
    if content.get("ask") != requested.ask:
        return "it answers another order than the last one (an old answer, sent again?)"
    if len(reply.answer) > requested.most:
        return f"it has {len(reply.answer):,} bytes, and at most {requested.most:,} were expected"
    examples, steps = content.get("examples"), content.get("steps", 0)
    if not _counts(examples):
        return f"its number of examples is {reprlib.repr(examples)}"
    if examples != requested.examples:
        return f"its number of examples is {examples}, and was {requested.examples} when it joined"
    if "loss" in content and reply.number("loss", -_LARGEST, _LARGEST) is None:
        return f"its loss is {reprlib.repr(content['loss'])}"
    if type(steps) is not int or steps not in _COUNTS:
        return f"its number of steps is {reprlib.repr(steps)}"
    try:
        unpack(reply.answer, requested.given.skeleton)
    except WireError as error:
        return str(error)
    return ""
