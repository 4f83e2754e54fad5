"""A network in one process: nodes with folders of their own behind a link that can lose, delay and spoil replies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from small_run import CLIENTS, Small

from llm_fed.configfile import as_dict, from_dict
from llm_fed.network import server
from llm_fed.network.link import Reply
from llm_fed.network.node import Node, Place
from llm_fed.runs.folder import read_records

NETWORK = {"clients": sorted(CLIENTS), "deadline": 0.3, "patience": 0.5}
Spoil = Callable[[Mapping[str, Any], Reply], Reply | None]  # (order, reply) -> what comes instead; None: nothing yet


def only(client: str | None, kind: str, spoil: Callable[[Reply], Reply | None]) -> Spoil:
    """Spoils the replies of one client (None: of all) to orders of one kind."""

    def spoilt(order: Mapping[str, Any], reply: Reply) -> Reply | None:
        meant = order["kind"] == kind and client in (None, order["client"])
        return spoil(reply) if meant else reply

    return spoilt


class NetworkInProcess:
    """Nodes 1, 2, ... of one client each, with only this client's data. Orders are carried out as they are sent, and
    whatever crosses is JSON and bytes."""

    def __init__(self, folder: Path, small: Small, tree: dict[str, Any], spoil: Spoil = lambda order, reply: reply):
        self.config = from_dict(tree | {"task": {**tree["task"], "path": None}})
        self._text = yaml.safe_dump(as_dict(self.config))
        self.places, self.orders, self._spoil = {}, [], spoil
        self._replies: dict[str, Reply] = {}
        self.sent = 0
        self.online = set(range(1, len(CLIENTS) + 1))
        self.names = dict(enumerate(CLIENTS, 1))  # under which the operator registered the nodes
        for node, client in enumerate(CLIENTS, 1):
            data = folder / f"data-{client}"
            if not data.exists():
                shutil.copytree(small.data / client, data / client)
            self.places[node] = Place(folder / f"home-{client}", str(data))
        self.workers = {node: Node() for node in self.places}

    def nodes(self) -> Mapping[int, str]:
        return {node: self.names[node] for node in self.online}

    def send(self, orders: Sequence[tuple[int, Mapping[str, Any], bytes]], patience: float) -> list[str | None]:
        return [self._carry_out(*order) for order in orders]

    def receive(self, ids: Collection[str]) -> dict[str, Reply]:
        return {id: self._replies.pop(id) for id in list(ids) if id in self._replies}

    def deliver(self, id: str, reply: Reply) -> None:
        """A reply that comes only now."""
        self._replies[id] = reply

    def _carry_out(self, node: int, order: Mapping[str, Any], content: bytes) -> str:
        self.sent += 1
        id, order = str(self.sent), json.loads(json.dumps(order))
        self.orders.append(order)
        reply, answer = self.workers[node].answer(self.places[node], self._text, order, content)
        came = self._spoil({**order, "id": id}, Reply(json.loads(json.dumps(reply)), answer))
        if came is not None:
            self._replies[id] = came
        return id


def tree(small: Small, **changes: Any) -> dict[str, Any]:
    return small.tree(**{"network": NETWORK, **changes})


def federate(folder: Path, small: Small, settings: dict[str, Any], **options: Any) -> tuple[NetworkInProcess, Any]:
    link = NetworkInProcess(folder, small, settings, **options)
    return link, server.train(link.config, folder / "run", link)


def lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    return [line for line in read_records(folder / "run/metrics.jsonl") if line["kind"] in kinds]
