"""Bundles: one message to each node with the orders to all of its clients, and one reply with all their answers.

A message says its protocol, and has a list of orders, each for one client. Packed messages lie one after another in the
content beside it; an order names its place there, so what several clients are sent alike travels once:

    {"kind": "work", "protocol": 2, "orders": [{"kind": "train", "client": "ada", ..., "bytes": [0, 9000]}, ...]}

The reply has as many entries as the message has orders, in the same order, and their answers likewise. A node that
says something else about one client spoils this client's answer, and no other's.
"""

from __future__ import annotations

import re
import reprlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_fed.network.link import Link, Reply

PROTOCOL = 2  # 1: each order was a message of its own
RUN_NAME = re.compile(r"[\w.+-]*\w[\w.+-]*")  # names a folder at nodes, to whom the server is another party
MOST = 2**30  # bytes of one message; Flower's processes and the worker each hold a message whole


@dataclass(frozen=True)
class Order:
    """What one client is to do."""

    client: str
    says: Mapping[str, Any]  # the kind of work and what it needs, as JSON
    content: bytes = b""  # a packed message
    answer: int = 0  # bytes that its answer will have, about


def joined(
    entries: Sequence[Mapping[str, Any]], contents: Sequence[bytes], *, once: bool
) -> tuple[list[dict[str, Any]], bytes]:
    """These entries, each with the place of its content as `bytes`, and the contents one after another. `once`: whether
    equal contents lie there once. In a reply each has bytes of its own, see `separated`."""
    indices: dict[bytes, list[int]] = {}
    placed, parts, size = [], [], 0
    for says, content in zip(entries, contents, strict=True):
        if not once or content not in indices:
            indices[content] = [size, size + len(content)]
            parts.append(content)
            size += len(content)
        placed.append({**says, "bytes": indices[content]})
    return placed, b"".join(parts)


def separated(replies: Any, answer: bytes, number: int, node: int) -> Iterator[Reply]:
    """The replies of a node to so many orders. Answers lie one after another, so that together they take no more memory
    than came; one that is not where it can be has an error, and so has one that is missing."""
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


def content_of(order: Mapping[str, Any], content: bytes) -> bytes:
    """The packed message of one order; ValueError where its place is none."""
    where: Any = order.get("bytes")
    if not _is_range(where, 0, len(content)):
        raise ValueError(f"its message cannot be at {reprlib.repr(where)} of {len(content):,} bytes")
    return content[where[0] : where[1]]


def _is_range(where: Any, least: int, most: int) -> bool:
    good = isinstance(where, list) and len(where) == 2 and all(type(end) is int for end in where)
    return good and least <= where[0] <= where[1] <= most


class Bundles:
    """Sends orders to clients, and gives out their replies one by one.

    Args:
        node: of a client, the id of its node.
    """

    def __init__(self, link: Link, node: Callable[[str], int], patience: float):
        self._link, self._node, self._patience = link, node, patience
        # By the id of a message on its way its node, and what the replies must name as `ask`; None: no longer awaited.
        self._sent: dict[str, tuple[int, list[str | None]]] = {}
        self._came: dict[str, Reply] = {}  # by `ask`, until it is received
        self._asks = 0

    def send(self, orders: Sequence[Order]) -> list[str | None]:
        """What the reply to each order must name as `ask`; None where it cannot be sent."""
        asks = []
        for _ in orders:
            self._asks += 1
            asks.append(f"{time.time_ns()}-{self._asks}")
        at: dict[int, list[int]] = {}
        for index, order in enumerate(orders):
            at.setdefault(self._node(order.client), []).append(index)
        messages = [(node, indices) for node, mine in at.items() for indices in _cut(orders, mine)]
        packed = []
        for node, indices in messages:
            said = [{**orders[index].says, "client": orders[index].client, "ask": asks[index]} for index in indices]
            entries, content = joined(said, [orders[index].content for index in indices], once=True)
            packed.append((node, {"kind": "work", "protocol": PROTOCOL, "orders": entries}, content))
        sent: list[str | None] = [None] * len(orders)
        for id, (node, indices) in zip(self._link.send(packed, self._patience), messages, strict=True):
            if id is not None:
                self._sent[id] = (node, [asks[index] for index in indices])
                for index in indices:
                    sent[index] = asks[index]
        return sent

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
    """The indices of a node's orders, cut where a message or its reply would exceed MOST; a client's stay together."""
    chosen: set[str] = set()
    contents: set[bytes] = set()
    down = up = 0
    for client in dict.fromkeys(orders[index].client for index in indices):
        own = [orders[index] for index in indices if orders[index].client == client]
        answer = sum(order.answer for order in own)
        if chosen and (down + _new(own, contents) > MOST or up + answer > MOST):
            yield [index for index in indices if orders[index].client in chosen]
            chosen, contents, down, up = set(), set(), 0, 0
        down, up = down + _new(own, contents), up + answer
        chosen.add(client)
        contents |= {order.content for order in own}
    yield [index for index in indices if orders[index].client in chosen]


def _new(orders: Iterable[Order], contents: set[bytes]) -> int:
    """The bytes of these orders that are not among the contents yet."""
    return sum(map(len, {order.content for order in orders} - contents))
