"""A network in one process whose nodes have registered keys, and which keeps all that crosses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric import ec
from network import NetworkInProcess

from llm_fed.network.link import Reply

NAMES = tuple(f"c{place}" for place in range(7))  # five of them open a secret
WAIT = {"clients": list(NAMES), "deadline": 30.0, "patience": 60.0}


def seven(small: Any, folder: Path) -> Any:
    """Seven clients with the rows of three."""
    for place, name in enumerate(NAMES):
        shutil.copytree(small.data / ("ada", "bob", "cyd")[place % 3], folder / name)
    return replace(small, data=folder)


def private_key(path: Path) -> ec.EllipticCurvePublicKey:
    key = ec.generate_private_key(ec.SECP384R1())
    form = keys.Encoding.PEM, keys.PrivateFormat.OpenSSH, keys.NoEncryption()
    path.write_bytes(key.private_bytes(*form))
    return key.public_key()


def line_of(name: str, key: ec.EllipticCurvePublicKey) -> str:
    return f"{name} {key.public_bytes(keys.Encoding.OpenSSH, keys.PublicFormat.OpenSSH).decode()}\n"


class SecureNetwork(NetworkInProcess):
    """Attributes:
    traffic: all bytes that crossed, in both directions.
    change: what comes in the place of an order that is sent to a node.
    """

    def __init__(self, folder: Path, *more: Any, change: Any = lambda order: order, **options: Any):
        super().__init__(folder, *more, nodes=[(name,) for name in NAMES], **options)
        self.traffic: list[bytes] = []
        self.change, peers = change, folder / "peers"
        folder.mkdir(exist_ok=True)
        for node, place in self.places.items():
            key = folder / f"key-{place.clients[0]}"
            if not key.exists():
                with open(peers, "a") as file:
                    file.write(line_of(place.clients[0], private_key(key)))
            self.places[node] = replace(place, key=str(key), peers=str(peers))

    def _carry_out(self, node: int, message: Any, content: bytes) -> str:
        if "orders" in message:
            message = {**message, "orders": [self.change(dict(order)) for order in message["orders"]]}
        self.traffic += [json.dumps(message).encode(), content]
        id = super()._carry_out(node, message, content)
        came = self._replies.get(id, Reply({}))
        self.traffic += [json.dumps(dict(came.content)).encode(), came.answer]
        return id
