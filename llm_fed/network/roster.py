"""Roster: who is there, at which node, and with how many examples. The operator's list decides, not the nodes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError, listed, one_line
from llm_fed.network.link import PROTOCOL, Link, Reply
from llm_fed.settings.config import NetworkConfig

_PAUSE = 0.5  # seconds between two looks for clients
_AGAIN = 60.0  # seconds until a node that cannot take part, or lacks a client that it should have, is asked again
_UNHEARD = 600.0  # seconds without an answer to a greeting after which the node is greeted again


def homes(clients: Sequence[str] | int) -> dict[str, str]:
    """By client the node that may have it, of `network.clients`: its own name, or what is after @. UserError: one is
    twice."""
    nodes: dict[str, str] = {}
    for word in () if isinstance(clients, int) else clients:
        name, at, node = word.rpartition("@")
        name = name if at else word
        if name in nodes:
            raise UserError(f"network.clients has {name} twice; a client is at one node")
        nodes[name] = node
    return nodes


class Roster:
    """The clients that nodes have.

    A client is at the node that the operator registered under its name, or that `network.clients` names after an @. It
    stays at the node, and with the number of examples, that it had when the run began.
    """

    def __init__(self, link: Link, settings: NetworkConfig, say: Callable[[str], None]):
        self._link, self._settings, self._say = link, settings, say
        self.homes = homes(settings.clients)  # of the clients that are named there
        self.owners: dict[str, int] = {}  # by client the id of the node that had it first
        self.examples: dict[str, int] = {}  # by client the number of training examples that it said first
        self.node: dict[str, int] = {}  # by client the id of its node, as far as that is known to be there
        self.certificates: dict[str, tuple[str, str]] = {}  # by client, with `privacy.secure`
        self.unscored: set[str] = set()  # clients without test examples, as their nodes say
        self.base = ""  # the fingerprint that the base of every node must have
        self._again: dict[int, float] = {}  # by node that was greeted, when it is greeted again
        self._announced: set[str] = set()  # of what nodes bring, what was said already
        self._greetings: dict[str, int] = {}  # hellos on their way, to which node

    def gather(self, wanted: Sequence[str] | int) -> tuple[str, ...]:
        """Wait for these clients, or for so many, at most `network.wait` seconds; the clients of the run in their
        order, those without one sorted by name. Who has a name and is missing is among them, and joins when it comes.
        RunError: no client has come by then."""
        begun, limit = time.monotonic(), self._settings.wait
        named = None if isinstance(wanted, int) else tuple(wanted)
        number = wanted if isinstance(wanted, int) else len(wanted)
        while True:
            self.greet()
            connected = sorted(self.node) if named is None else [name for name in named if name in self.node]
            if len(connected) >= number:
                return tuple(connected)
            lacking = f": {', '.join(name for name in named if name not in connected)}" if named else ""
            if limit is not None and time.monotonic() - begun > limit:
                break
            self.say_once(f"{len(connected)} of {number} clients are connected; waiting for the others{lacking}")
            time.sleep(_PAUSE)
        waited = f"in {limit:g} s (network.wait)"
        if not connected:
            raise RunError(f"no client has come {waited}{lacking}; see to the nodes, then give the same command again")
        later = "they join when they come" if named else "who comes later takes no part"
        self._say(f"{len(connected)} of {number} clients have come {waited}; going on without the others{lacking}; "
                  f"{later}")  # fmt: skip
        return named or tuple(connected)

    def greet(self) -> None:
        """Ask which clients they have those nodes that are new or were away, and from time to time those that could not
        take part, lacked a client or did not answer, as that may have changed; take in what was answered."""
        nodes, now = self._link.nodes(), time.monotonic()
        self._again = {node: then for node, then in self._again.items() if node in nodes}
        self._greetings = {id: node for id, node in self._greetings.items() if node in nodes}
        new = sorted(node for node in nodes if self._again.get(node, now) <= now)
        hello: dict[str, Json] = {"kind": "hello", "protocol": PROTOCOL}
        ids = self._link.send([(node, hello, b"") for node in new], self._settings.patience)
        for id, node in zip(ids, new, strict=True):
            if id is not None:
                self._greetings[id], self._again[node] = node, now + _UNHEARD
        for id, reply in self._link.receive(self._greetings.keys()).items():
            node = self._greetings.pop(id)
            self.node = {name: its_node for name, its_node in self.node.items() if its_node != node}
            self._again[node] = time.monotonic() + _AGAIN
            if why := self._refusal(reply):
                self.say_once(f"node {node} cannot take part: {why}")
                continue
            if idle := reply.names("idle"):
                self.say_once(f"node {node}: these clients have no training example and are left out: {listed(idle)}")
            self._admit(node, nodes[node], reply.clients)
            mine = {name for name in reply.clients if self.node.get(name) == node}
            self.certificates |= {name: pair for name, pair in reply.certificates.items() if name in mine}
            expected = [name for name, home in self.homes.items() if home == nodes[node]]
            if mine and all(self.node.get(name) == node for name in expected):
                self._again[node] = math.inf  # it has brought every client that `network.clients` places there
            self.unscored |= {*reply.names("unscored")}

    def say_once(self, text: str) -> None:
        """Say what every greeting of a node, or look for clients, would say again."""
        if text not in self._announced:
            self._announced.add(text)
            self._say(text)

    def _refusal(self, reply: Reply) -> str:
        """Why a node cannot take part now, by its answer to a greeting; empty where it can."""
        if reply.error:
            return reply.error
        if (spoken := reply.content.get("protocol", 1)) != PROTOCOL:
            return (
                f"it speaks version {one_line(str(spoken))} of the protocol, and the server version {PROTOCOL}; "
                "install the server's llm_fed there, and end its worker"
            )
        return "" if reply.content.get("base") == self.base else "its base model is not the server's"

    def weight(self, name: str, among: Iterable[str]) -> int:
        """A client's number of examples, but at most `network.weight_bound` times the median over `among`."""
        return min(self.examples[name], self.largest(among))

    def largest(self, among: Iterable[str]) -> int:
        """The largest number of examples with which a client counts, see `weight`."""
        known = [self.examples[other] for other in among if other in self.examples]  # who never came said nothing
        bound = self._settings.weight_bound
        return max(known) if bound is None else min(max(known), int(bound * statistics.median_low(known)))

    def say_weights(self, among: Sequence[str]) -> None:
        """Tell the operator whose numbers of examples count as less than they are."""
        for name in among:
            if (weight := self.weight(name, among)) < self.examples[name]:
                self._say(
                    f"{name} claims {self.examples[name]:,} examples; they count as {weight:,}, "
                    f"{self._settings.weight_bound:g} times the median (network.weight_bound)"
                )

    def _admit(self, node: int, registered: str, clients: Mapping[str, int]) -> None:
        """Take those of the clients that a node says it has which it may have. `registered`: the node's name, which the
        operator gave. `clients`: by name how many examples it says that they have."""
        others = [name for name in clients if self.homes.get(name, name) != registered]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            self.say_once(
                f"node {node}, registered as {registered!r}, says that it has {', '.join(others[:3])}{more}, which "
                f"network.clients does not place there; if it should: {others[0]}@{registered or 'NODE'}"
            )
        for name in clients.keys() - set(others):
            if self.owners.setdefault(name, node) != node:
                self.say_once(
                    f"node {node} says that it has client {name}, which is node {self.owners[name]}'s since this run "
                    "began; if its machine was replaced, take it out of the run folder's network.json"
                )
            elif self.examples.setdefault(name, clients[name]) != clients[name]:
                self.say_once(
                    f"node {node} says that {name} has {clients[name]:,} examples, and had {self.examples[name]:,} "
                    "when this run began; with other data begin anew (fresh=true)"
                )
            else:
                self.node[name] = node
