"""What carries orders to nodes: one message to each with the orders to all of its clients, one reply with all their
answers, and what may be believed of it.

Packed messages lie one after another in the content beside a message; an order names its place there, so what several
clients are sent alike travels once:

    {"kind": "work", "protocol": 2, "orders": [{"kind": "train", "client": "ada", ..., "bytes": [0, 9000]}, ...]}

The reply has as many entries as the message has orders, in the same order, and their answers likewise. A node that
says something else about one client spoils this client's answer, and no other's.
"""

from __future__ import annotations

import json
import re
import reprlib
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, TypeGuard

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import one_line
from llm_fed.scoring.rules import NAMES
from llm_fed.scoring.scores import BESIDE, Summary, summarize
from llm_fed.secure.cohort import CohortFields
from llm_fed.settings.config import Dtype
from llm_fed.state.roles import Given
from llm_fed.state.wire import WireError, unpack

PROTOCOL = 2  # 1: each order was a message of its own
RUN_NAME = re.compile(r"[\w.+-]*\w[\w.+-]*")  # names a folder at nodes, to whom the server is another party
MOST = 2**30  # bytes of one message; Flower's processes and the worker each hold a message whole
_COUNTS = range(2**53)  # whole numbers that every float holds
LARGEST = 3.4e38  # that a loss can be: training computes in float32
BOUNDS = -100, 100  # of a score: correlations may be negative
_LONGEST = 65536  # characters of a recipe, written as JSON


class OrderFields(TypedDict, total=False):
    """What an order says, by its `kind`; see `clients` and `summed`. A server that lies may say anything else."""

    kind: str
    client: str
    ask: str  # by which its reply is known
    bytes: list[int]  # where its packed message begins and ends
    run: str  # the token of the run
    round: int
    lr: float
    after: int  # the round of the memory to go on from; 0: of none
    kept: list[int]  # rounds whose memories the server still needs
    split: str
    name: str  # of the folder for personal models
    given: dict[str, OrderFields]  # of a merge, by parent: `run` and `after` there
    spent: Mapping[str, Json] | None  # of the clients' privacy
    ended: int
    cohort: CohortFields
    certificates: Mapping[str, tuple[str, str]]
    sealed: Mapping[str, str]
    present: list[str]
    largest: int
    alive: list[str]
    proofs: Mapping[str, str]


class MessageFields(TypedDict, total=False):
    """What a message to a node says."""

    kind: str
    protocol: int
    orders: list[OrderFields]
    run: str
    dtype: Dtype  # what `base.dtype: auto` means in the run
    need: str  # the parent of a merge that it is about


@dataclass(frozen=True)
class Reply:
    """What came back for one order; `error` where nothing useful did. `content` may hold anything that JSON can, and is
    to be read through what stands here."""

    content: Mapping[str, Json]
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
        return self.number("loss", 0, LARGEST)

    @property
    def beside(self) -> dict[str, float]:
        """What was measured beside the score, by name, as far as it can be that."""
        found = {name: _within(value, -LARGEST, LARGEST) for name, value in self._fields("beside").items()}
        return {name: value for name, value in found.items() if name in BESIDE and value is not None}

    @property
    def rule(self) -> tuple[str, float] | None:
        """The name and the score of its best rule that trains nothing; None where there is none that could be one."""
        name, score = self.content.get("rule"), self.number("rule_score", *BOUNDS)
        return None if score is None or name not in NAMES else (str(name), score)

    @property
    def of_base(self) -> Reply:
        """What the base is worth on its examples, to be read like a reply of its own."""
        return Reply(self._fields("of_base"))

    @property
    def tested(self) -> int:
        """How many test examples it has; 0 where it does not say so."""
        return int(self.number("tested", 0, 2**31) or 0)

    @property
    def warned(self) -> Mapping[str, Json]:
        """Figures by the kind of a warning, not checked any further."""
        given = self._fields("warnings")
        return given if len(repr(given)) <= _LONGEST else {}

    @property
    def clients(self) -> dict[str, int]:
        """By the name of each client that it says it has, the number of its training examples."""
        return {name: number for name, number in self._fields("clients").items() if _is_name(name) and _counts(number)}

    @property
    def certificates(self) -> dict[str, tuple[str, str]]:
        """By client what says that a key is its own, which other clients check."""
        found: dict[str, tuple[str, str]] = {}
        for name, pair in self._fields("certificates").items():
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(half, str) for half in pair):
                found[name] = pair[0], pair[1]
        return found

    def names(self, key: str) -> list[str]:
        """The names in this place that could be those of clients."""
        given = self.content.get(key)
        names = given if isinstance(given, list) and not self.error else []
        return [name for name in names if isinstance(name, str) and _is_name(name)]

    @property
    def unscored(self) -> bool:
        """Whether it says that the client has no example to be scored on."""
        return not self.error and self.content.get("score", "missing") is None

    def recipe(self) -> dict[str, Json]:
        """What a merging method found out at the client, its texts in printable lines. ValueError: it cannot be one."""
        recipe = self.content.get("recipe")
        try:
            if isinstance(recipe, dict) and len(json.dumps(recipe, allow_nan=False)) <= _LONGEST:
                return {one_line(key): _printable(value) for key, value in recipe.items()}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its recipe is malformed: {type(error).__name__}") from error
        raise ValueError("its recipe is malformed, or too long")

    def number(self, key: str, least: float, most: float) -> float | None:
        """The number in this place, from `least` to `most`; None where there is none."""
        return None if self.error else _within(self.content.get(key), least, most)

    def _text(self, key: str) -> str:
        text = self.content.get(key, "")
        return one_line(text) if isinstance(text, str) else f"what it says as {key} is no text"

    def _fields(self, key: str) -> dict[str, Json]:
        given = self.content.get(key)
        return given if isinstance(given, dict) and not self.error else {}


def _within(value: Json, least: float, most: float) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if least <= value <= most else None  # as NaN is not


def _is_name(text: str) -> bool:
    return bool(text) and one_line(text) == text


def _counts(value: Json) -> TypeGuard[int]:
    """Whether it can be a number of examples."""
    return type(value) is int and value in _COUNTS and value > 0


def _printable(node: Json) -> Json:
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
    beside = {name: replies[name].beside for name in scores}
    return summarize(metric, scores, losses, unscored, beside) if scores else None


class Link(Protocol):
    """Carries orders to nodes and brings back their replies."""

    def nodes(self) -> Mapping[int, str]:
        """Those that are there now, by their id the name under which the operator registered their key."""

    def send(self, orders: Sequence[tuple[int, Mapping[str, Json], bytes]], patience: float) -> list[str | None]:
        """An id for each order (None: it cannot be sent); no reply is awaited longer than `patience` seconds."""

    def receive(self, ids: Collection[str]) -> dict[str, Reply]:
        """The replies that have come by now, by the id of their order; each is given out once."""


@dataclass(frozen=True)
class PendingOrder:
    """An order to train on its way, and what its answer must be like."""

    client: str
    round: int
    ask: str
    since: float
    down: int  # bytes
    most: int  # bytes that the upload may have
    given: Given  # what the upload must be like, and how many examples the client said it has when it joined


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
    if type(examples) is not int or examples != requested.given.examples:
        said = reprlib.repr(examples)
        return f"its number of examples is {said}, and was {requested.given.examples} when it joined"
    if "loss" in content and reply.number("loss", -LARGEST, LARGEST) is None:
        return f"its loss is {reprlib.repr(content['loss'])}"
    if type(steps) is not int or steps not in _COUNTS:
        return f"its number of steps is {reprlib.repr(steps)}"
    try:
        unpack(reply.answer, requested.given.skeleton)
    except WireError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Order:
    """What one client is to do."""

    client: str
    says: Mapping[str, Json]  # the kind of work and what it needs, as JSON
    content: bytes = b""  # a packed message
    answer: int = 0  # bytes that its answer will have, about


def joined(
    entries: Sequence[Mapping[str, Json]], contents: Sequence[bytes], *, once: bool
) -> tuple[list[dict[str, Json]], bytes]:
    """These entries, each with the place of its content as `bytes`, and the contents one after another. `once`: whether
    equal contents lie there once. In a reply each has bytes of its own, see `separated`."""
    indices: dict[bytes, list[int]] = {}
    placed: list[dict[str, Json]] = []
    parts, size = [], 0
    for says, content in zip(entries, contents, strict=True):
        if not once or content not in indices:
            indices[content] = [size, size + len(content)]
            parts.append(content)
            size += len(content)
        placed.append({**says, "bytes": indices[content]})
    return placed, b"".join(parts)


def separated(replies: Json, answer: bytes, number: int, node: int) -> Iterator[Reply]:
    """The replies of a node to so many orders. Answers lie one after another, so that together they take no more memory
    than came; one that is missing, or cannot be where it says, has an error."""
    entries = replies if isinstance(replies, list) else []
    start = 0
    for index in range(number):
        entry = entries[index] if index < len(entries) else None
        if not isinstance(entry, dict):
            yield Reply({"error": f"the message of its node {node} has no reply of it"})
            continue
        where = entry.get("bytes", [start, start])
        if not _is_range(where, start, len(answer)):
            said = f"its answer cannot be at {reprlib.repr(where)} of {len(answer):,} bytes"
            yield Reply({"error": f"the message of its node {node} is wrong: {said}"})
            continue
        yield Reply(entry, answer[where[0] : where[1]])
        start = where[1]


def content_of(order: OrderFields, content: bytes) -> bytes:
    """The packed message of one order; ValueError where its place is none."""
    where = order.get("bytes")
    if not _is_range(where, 0, len(content)):
        raise ValueError(f"its message cannot be at {reprlib.repr(where)} of {len(content):,} bytes")
    return content[where[0] : where[1]]


def _is_range(where: Json, least: int, most: int) -> TypeGuard[list[int]]:
    if not isinstance(where, list) or len(where) != 2:
        return False
    begin, end = where
    return type(begin) is int and type(end) is int and least <= begin <= end <= most


class Bundles:
    """Sends orders to clients, and gives out their replies one by one. `node`: of a client, the id of its node."""

    def __init__(self, link: Link, node: Callable[[str], int], patience: float):
        self._link, self._node, self._patience = link, node, patience
        # By the id of a message on its way its node, and what the replies must name as `ask`; None: no longer awaited.
        self._sent: dict[str, tuple[int, list[str | None]]] = {}
        self._came: dict[str, Reply] = {}  # by `ask`, until it is received

    def send(self, orders: Sequence[Order]) -> list[str | None]:
        """What the reply to each order must name as `ask`; None where it cannot be sent."""
        asks = [secrets.token_hex(8) for _ in orders]
        at: dict[int, list[int]] = {}
        for index, order in enumerate(orders):
            at.setdefault(self._node(order.client), []).append(index)
        messages = [(node, indices) for node, mine in at.items() for indices in _cut(orders, mine)]
        packed = []
        for node, indices in messages:
            said = [{**orders[index].says, "client": orders[index].client, "ask": asks[index]} for index in indices]
            entries, content = joined(said, [orders[index].content for index in indices], once=True)
            message: dict[str, Json] = {"kind": "work", "protocol": PROTOCOL, "orders": entries}
            packed.append((node, message, content))
        for id, (node, indices) in zip(self._link.send(packed, self._patience), messages, strict=True):
            if id is not None:
                self._sent[id] = (node, [asks[index] for index in indices])
        sent = {ask for _, its in self._sent.values() for ask in its}
        return [ask if ask in sent else None for ask in asks]

    def receive(self, asks: Collection[str]) -> dict[str, Reply]:
        """The replies to these that have come by now; each is given out once."""
        ids = [id for id, (_, sent) in self._sent.items() if not set(sent).isdisjoint(asks)]
        for id, reply in (self._link.receive(ids) if ids else {}).items():
            node, sent = self._sent.pop(id)
            failed = Reply({"error": f"node {node}: {reply.error}"})
            replies = separated(reply.content.get("replies"), reply.answer, len(sent), node)
            for ask, own in zip(sent, replies, strict=True):
                if ask is not None:
                    self._came[ask] = failed if reply.error else own
        return {ask: self._came.pop(ask) for ask in asks if ask in self._came}

    def forget(self, asks: Collection[str]) -> None:
        """No longer wait for these."""
        for ask in asks:
            self._came.pop(ask, None)
        left = {id: (node, [None if ask in asks else ask for ask in sent]) for id, (node, sent) in self._sent.items()}
        self._sent = {id: (node, sent) for id, (node, sent) in left.items() if any(sent)}


def _cut(orders: Sequence[Order], indices: Sequence[int]) -> Iterator[list[int]]:
    """A node's orders in parts of which neither message nor reply exceeds MOST; a client's stay together."""
    down: Counter[str] = Counter()
    up: Counter[str] = Counter()
    for index in indices:
        client, content = orders[index].client, orders[index].content
        down[client] = max(down[client], len(content))
        up[client] += orders[index].answer
    most = max(1, MOST // max(1, *down.values(), *up.values()))
    clients = [*down]
    for start in range(0, len(clients), most):
        chosen = clients[start : start + most]
        yield [index for index in indices if orders[index].client in chosen]
