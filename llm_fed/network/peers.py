"""The keys of `privacy.secure` at a node: its own, with which it is registered, and those of the others, which its
owner has from their owners and not from the server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization as keys
from cryptography.hazmat.primitives.asymmetric import ec

from llm_fed.basics.documents import load_json
from llm_fed.basics.files import make_folder, write_file
from llm_fed.network.node_folders import plain
from llm_fed.network.refusals import Refused
from llm_fed.secure import party
from llm_fed.secure.keys import Unsafe
from llm_fed.secure.party import Party

Identities = Mapping[str, ec.EllipticCurvePublicKey]


def read(path: str | None) -> Identities:
    """By client the public key of its node, of a file with a line for each node, in the form of OpenSSH's
    `allowed_signers`: names of clients with commas in between, the kind of the key, and the key. Refused: the file is
    none, or two nodes have one key."""
    if not path:
        raise Refused("setup", 'privacy.secure needs peers="FILE" and key="FILE" in --node-config')
    found: dict[str, ec.EllipticCurvePublicKey] = {}
    lines: dict[bytes, int] = {}
    try:
        text = Path(path).read_text(encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            names, _, rest = line.strip().partition(" ")
            key = keys.load_ssh_public_key(rest.encode())
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise Refused("setup", f"{path}, line {number}: the key is no ecdsa key, as Flower's nodes have")
            raw = key.public_bytes(keys.Encoding.X962, keys.PublicFormat.CompressedPoint)
            if (other := lines.setdefault(raw, number)) != number:
                raise Refused("setup", f"{path}: lines {other} and {number} have one key; each node needs its own")
            for name in names.split(","):
                if name in found:
                    raise Refused("setup", f"{path}, line {number}: {name} stands there twice")
                found[name] = key
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise Refused("setup", f"--node-config peers: {path} cannot be read: {error}") from error
    return found


def identity(path: str | None, clients: Sequence[str], identities: Identities) -> ec.EllipticCurvePrivateKey:
    """The node's own private key. Refused: the file has none, or another than the list has for these clients."""
    if not path:
        raise Refused("setup", 'privacy.secure needs key="FILE" in --node-config, the one that Flower is given')
    try:
        data = Path(path).read_bytes()
        load = keys.load_ssh_private_key if b"OPENSSH" in data else keys.load_pem_private_key
        key = load(data, None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise Refused("setup", f"--node-config key: {path} cannot be read: {error}") from error
    others = [name for name in clients if name not in identities or identities[name] != key.public_key()]
    if others or not isinstance(key, ec.EllipticCurvePrivateKey):
        raise Refused("setup", f"--node-config key: {path} is not the key that peers has for {others[0]}")
    return key


def certificates(
    home: Path, run: str, clients: Sequence[str], key: str | None, peers: str | None
) -> dict[str, party.Certificate]:
    """By client what says that its key in a run is its own."""
    identities = read(peers)
    own, said = identity(key, clients, identities), {}
    for client in clients:
        with taking_part(home, run, client, identities) as known:
            said[client] = party.certificate(known.memory, run, client, own)
    return said


@contextmanager
def taking_part(home: Path, run: str, client: str, identities: Identities) -> Iterator[Party]:
    """A client in a run, which remembers what it did before its answer leaves."""
    file = home / "secure" / plain(run) / client / "party.json"
    memory = load_json(file.read_bytes()) if file.exists() else party.begin()
    try:
        yield Party(client, identities, memory)
    except Unsafe as error:
        raise Refused(f"secure.{error.code}", str(error)) from error
    make_folder(file.parent, 0o700)
    write_file(file, json.dumps(memory).encode(), private=True)
