"""The server's own data: examples taken out of the task's test split, or another task's, and a test set for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import derive
from llm_fed.settings.config import ServerConfig
from llm_fed.tasks.common import ClientData, where
from llm_fed.tasks.splits import ByContent

NAME = "server"


def in_domain(
    clients: dict[str, ClientData], config: ServerConfig, seed: int, rule: ByContent
) -> tuple[dict[str, ClientData], ClientData]:
    """The natural clients without the test examples that the server takes, and the server. `config.examples` are drawn
    uniformly from the test examples of all clients together, or of `each`; with `config.test` the others become the
    server's test set. With another task's name nothing is drawn here."""
    count = config.examples if config.name is None and config.examples is not None else 0
    tests = {name: client.test for name, client in clients.items()}
    if config.each:
        seeds = {name: derive(seed, NAME, name) for name in tests}
        for name, test in tests.items():
            _check(count, test, f"client {name!r}")
        taken = dict(zip(tests, rule.draw(list(tests.values()), count, list(seeds.values())), strict=True))
    else:
        everything = [example for test in tests.values() for example in test]
        _check(count, everything, "the task's test split")
        (mask,) = rule.draw([everything], count, [derive(seed, NAME)])
        taken = dict(zip(tests, np.split(mask, np.cumsum([len(test) for test in tests.values()])[:-1]), strict=True))
    left = {name: tuple(where(test, ~taken[name])) for name, test in tests.items()}
    train = tuple(example for name, test in tests.items() for example in where(test, taken[name]))
    own_test: tuple = ()
    if config.test:
        own_test = tuple(example for examples in left.values() for example in examples)
        left = {name: () for name in clients}
        if not own_test:
            raise UserError(f"task.server.test=true, but task.server.examples={count} leaves no test example; lower it")
    smaller = {name: dataclasses.replace(client, test=left[name]) for name, client in clients.items()}
    return smaller, ClientData(NAME, train, test=own_test)


def out_of_domain(
    server: ClientData, others: dict[str, ClientData], count: int | None, seed: int, rule: ByContent
) -> ClientData:
    """The server with `count` training examples of another task's clients, drawn uniformly; None: all."""
    pool = [example for client in others.values() for example in client.train]
    if count is not None:
        _check(count, pool, "the training split of task.server.name")
        (mask,) = rule.draw([pool], count, [derive(seed, NAME, "another task")])
        pool = list(where(pool, mask)[:count])  # with copies there may be more
    return dataclasses.replace(server, train=tuple(pool))


def _check(count: int, pool: Sequence[Any], where: str) -> None:
    if count > len(pool):
        raise UserError(f"task.server.examples={count}, but there are {len(pool)} to take from {where}; lower it")
