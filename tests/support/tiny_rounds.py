"""Rounds of a method on small whole image models, by hand: what a plain PyTorch loop is compared with."""

from collections.abc import Sequence
from typing import Any

import torch
from tiny_images import answer, party, pictures
from torch import Tensor

from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images
from llm_fed.method import Method, Upload
from llm_fed.method.client import Client
from llm_fed.method.site import Site
from llm_fed.models.structure import Full
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State
from llm_fed.state.wire import pack, unpack
from llm_fed.testing.tiny import architecture

base_of = architecture
SGD = LocalConfig(steps=None, epochs=1, batch_size=4, lr=0.05, optimizer="sgd")
LRS = (0.05, 0.02)  # of two rounds
TRAIN = {"c0": pictures(9, 1), "c1": pictures(5, 2)}  # the last batch of either holds one picture


def sites(base: Images, method: Method, own: Sequence[str] = ("",), train: Any = None) -> dict[str, Site]:
    """The clients; client k holds the (k mod n)-th architecture of `own`."""
    made = {}
    for k, (name, examples) in enumerate((train or TRAIN).items()):
        plain = Full((("", own[k % len(own)]),))
        made[name] = party(base, examples, name, method.wrap(plain, None), SGD)
        made[name].structure = method.wrap(plain, made[name])
    return made


def server_of(base: Images, method: Method, clients: dict[str, Site]) -> Site:
    server = party(base, (), "server", method.wrap(Full(), None), SGD)
    server.clients = tuple(clients)
    return server


def federate(base: Images, method: Method, clients: dict[str, Site], rounds: int = 2, state: Any = None) -> Any:
    """The server's state afterwards. Messages pass through bytes, as in a run."""
    engine, server = Engine(base), server_of(base, method, clients)
    state = method.init(server) if state is None else state
    for round, lr in enumerate(LRS[:rounds], 1):
        uploads = []
        for name, client in clients.items():
            client.begin(round, lr)
            message = unpack(pack(method.broadcast(state, name)))
            content = answer(engine, method.client_update(client, message))
            uploads.append(Upload(name, client.num_examples, 0, unpack(pack(content))))
        server.begin(round, lr)
        state = answer(engine, method.server_update(server, state, uploads))
    return state


def personal(base: Images, method: Method, client: Client, state: Any) -> State:
    message = method.broadcast(state, client.id)
    return answer(Engine(base), method.personalize(client, message))


def batches(base: Images, client: Client) -> list[tuple[Tensor, Tensor, list[int]]]:
    """What each step of this round sees: inputs, labels, and places among the client's pictures."""
    places = {id(picture): place for place, picture in enumerate(client.train)}
    return [
        (
            base.prepare(torch.stack([picture.pixels for picture in batch])),
            torch.tensor([picture.label for picture in batch]),
            [places[id(picture)] for picture in batch],
        )
        for batch in client.batches(epochs=1)
    ]
