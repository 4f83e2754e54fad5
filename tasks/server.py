"""The server's own data: examples taken out of the task's test split, or another task's, and a test set for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from llm_fed.config import ServerConfig
from llm_fed.errors import UserError
from llm_fed.rng import derive
from llm_fed.tasks.common import ClientData, Item

NAME = "server"


def in_domain(
    clients: dict[str, ClientData], config: ServerConfig, seed: int
) -> tuple[dict[str, ClientData], ClientData]:
    """The natural clients without the test examples that the server takes, and the server.

    `config.examples` are drawn uniformly from the test examples of all clients together, or of `each`; with
    `config.test` the others become the server's test set. With another task's name nothing is drawn here.
    """
    places = {name: [(name, i) for i in range(len(client.test))] for name, client in clients.items()}
    everywhere = [place for part in places.values() for place in part]
    count = config.examples if config.name is None and config.examples is not None else 0
    if config.each:
        drawn = {place for name, part in places.items() for place in _draw(part, count, f"client {name!r}", seed, name)}
    else:
        drawn = set(_draw(everywhere, count, "the task's test split", seed))
    left = {name: tuple(e for i, e in enumerate(c.test) if (name, i) not in drawn) for name, c in clients.items()}
    train = tuple(clients[name].test[i] for name, i in everywhere if (name, i) in drawn)
    test: tuple = ()
    if config.test:
        test = tuple(example for examples in left.values() for example in examples)
        left = {name: () for name in clients}
        if not test:
            raise UserError(f"task.server.test=true, but task.server.examples={count} leaves no test example; lower it")
    smaller = {name: dataclasses.replace(client, test=left[name]) for name, client in clients.items()}
    return smaller, ClientData(NAME, train, test=test)


def out_of_domain(server: ClientData, others: dict[str, ClientData], count: int | None, seed: int) -> ClientData:
    """The server with `count` training examples of another task's clients, drawn uniformly; None: all."""
    pool = [example for client in others.values() for example in client.train]
    if count is not None:
        pool = _draw(pool, count, "the training split of task.server.name", seed, "another task")
    return dataclasses.replace(server, train=tuple(pool))


def _draw(pool: Sequence[Item], count: int, where: str, seed: int, *parts: str) -> list[Item]:
    """`count` of the pool, in its order."""
    if count > len(pool):
        raise UserError(f"task.server.examples={count}, but there are {len(pool)} to take from {where}; lower it")
    drawn = np.random.default_rng(derive(seed, NAME, *parts)).choice(len(pool), count, replace=False)
    return [pool[i] for i in sorted(drawn.tolist())]
