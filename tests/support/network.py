"""A network in one process: nodes with folders of their own behind a link that can lose, delay and spoil replies."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from small_run import CLIENTS, Small
from torch.testing import assert_close

from llm_fed.network import server
from llm_fed.network.link import PROTOCOL, Reply, joined, separated
from llm_fed.network.node import Node, NodeSettings
from llm_fed.runs.records import read_records
from llm_fed.settings.configfile import as_dict, from_dict

NETWORK = {"clients": sorted(CLIENTS), "deadline": 0.3, "patience": 0.5}
Spoil = Callable[[Mapping[str, Any], Reply], Reply | None]  # (order, reply) -> what comes instead; None: nothing yet


def only(client: str | None, kind: str, spoil: Callable[[Reply], Reply | None]) -> Spoil:
    """Spoils the replies of one client (None: of all) to orders of one kind."""

    def spoilt(order: Mapping[str, Any], reply: Reply) -> Reply | None:
        meant = order["kind"] == kind and client in (None, order["client"])
        return spoil(reply) if meant else reply

    return spoilt


HELLO = {"kind": "hello", "protocol": PROTOCOL}
ALONE = tuple((client,) for client in CLIENTS)  # each at a node of its own


def work(*orders: Mapping[str, Any], content: bytes = b"", **marks: str) -> dict[str, Any]:
    """A message with these orders; each is sent all of the content."""
    common = {"ask": "1", "bytes": [0, len(content)]}
    return {"kind": "work", "protocol": PROTOCOL, "orders": [{**common, **order} for order in orders], **marks}


class NetworkInProcess:
    """Nodes 1, 2, ... with the data of their own clients alone. Orders are carried out as they are sent, and whatever
    crosses is JSON and bytes.

    Attributes:
        messages: by node and number of orders, each that was sent.
        orders: all that came in them, and greetings.
    """

    def __init__(
        self,
        folder: Path,
        small: Small,
        tree: dict[str, Any],
        spoil: Spoil = lambda order, reply: reply,
        nodes: Sequence[Sequence[str]] = ALONE,
    ):
        self.config = from_dict(tree | {"task": {**tree["task"], "path": None}})
        self._text = yaml.safe_dump(as_dict(self.config))
        self.places, self.orders, self._spoil = {}, [], spoil
        self.messages: list[tuple[int, int]] = []
        self._replies: dict[str, Reply] = {}
        self.sent = 0
        self.online = set(range(1, len(nodes) + 1))
        self.names = {node: clients[0] for node, clients in enumerate(nodes, 1)}  # as the operator registered them
        for node, clients in enumerate(nodes, 1):
            data = folder / f"data-{clients[0]}"
            if not data.exists():
                for client in clients:
                    shutil.copytree(small.data / client, data / client)
            self.places[node] = NodeSettings(folder / f"home-{clients[0]}", str(data), tuple(clients))
        self.workers = {node: Node() for node in self.places}

    def nodes(self) -> Mapping[int, str]:
        return {node: self.names[node] for node in self.online}

    def send(self, orders: Sequence[tuple[int, Mapping[str, Any], bytes]], patience: float) -> list[str | None]:
        return [self._carry_out(*order) for order in orders]

    def receive(self, ids: Collection[str]) -> dict[str, Reply]:
        return {id: self._replies.pop(id) for id in list(ids) if id in self._replies}

    def deliver(self, id: str, *replies: Reply) -> None:
        """The replies to the orders of one message, which come only now."""
        own = [{key: value for key, value in reply.content.items() if key != "bytes"} for reply in replies]
        entries, joint = joined(own, [reply.answer for reply in replies], once=False)
        self._replies[id] = Reply({"replies": entries}, joint)

    def _carry_out(self, node: int, message: Mapping[str, Any], content: bytes) -> str:
        self.sent += 1
        id, message = str(self.sent), json.loads(json.dumps(message))
        orders = message.get("orders", [message])
        marks = {key: value for key, value in message.items() if key not in ("kind", "orders")}
        self.orders += [{**order, **marks} for order in orders]
        self.messages.append((node, len(orders)))
        reply, answer = self.workers[node].answer(self.places[node], self._text, message, content)
        whole = Reply(json.loads(json.dumps(reply)), answer)
        if "error" in reply or "orders" not in message:
            came = self._spoil({**message, "id": id}, whole) if "orders" not in message else whole
            if came is not None:
                self._replies[id] = came
            return id
        replies = separated(reply["replies"], answer, len(orders), node)
        spoilt = [self._spoil({**order, "id": id}, own) for order, own in zip(orders, replies, strict=True)]
        if all(own is not None for own in spoilt):
            self.deliver(id, *spoilt)
        return id


def tree(small: Small, **changes: Any) -> dict[str, Any]:
    return small.tree(**{"network": NETWORK, **changes})


def federate(folder: Path, small: Small, settings: dict[str, Any], **options: Any) -> tuple[NetworkInProcess, Any]:
    link = NetworkInProcess(folder, small, settings, **options)
    return link, server.train(link.config, folder / "run", link)


def lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Without the scores of the base alone, which nodes do not make."""
    found = [line for line in read_records(folder / "run/metrics.jsonl") if line["kind"] in kinds]
    return [line for line in found if line["kind"] != "score" or line["round"]]


def adapters(folder: Path) -> dict[str, Any]:
    return {str(path.relative_to(folder)): load_file(path) for path in sorted(folder.rglob("*.safetensors"))}


def assert_same_models(run: Path, network: Path, tolerance: float = 1e-5) -> None:
    """The personal models of a run in one process, and of the nodes of a network."""
    for client in CLIENTS:
        mine, theirs = adapters(run / "adapters" / client), adapters(network / f"home-{client}/adapters/run" / client)
        assert mine
        assert_close(theirs, mine, rtol=tolerance, atol=tolerance)
