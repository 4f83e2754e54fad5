"""Which examples belong to whom: natural clients, several of each of them, Dirichlet by label, or iid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from llm_fed.config import PartitionConfig, TaskConfig
from llm_fed.errors import UserError, lookup
from llm_fed.rng import derive
from llm_fed.tasks.common import ClientData, Item

SPLITS = ("train", "validation", "test")
DIRICHLET_DRAWS = 20  # tries until every client has examples to train and to be tested on


def partition(
    clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool = True
) -> dict[str, ClientData]:
    """The clients that `config.kind` makes of the natural ones, reproducible by seed.

    - natural: unchanged (a client per folder, task, or id; the loaders group by id).
    - split: `config.clients` clients of each natural client, with disjoint examples in every split.
    - iid: all examples of each split, shuffled and cut into equal parts.
    - dirichlet: for each label (`Example.group`), the clients' shares are one draw of Dirichlet(alpha), the
      same for train, validation and test up to rounding: a client is tested on the mixture it trains on.

    Every example goes to exactly one client. Unless the clients are `tested`, a test split is not needed, and the first
    Dirichlet draw counts, even where it gives a client nothing. UserError if there is too little data for so many
    clients.
    """
    return lookup("task.partition.kind", config.kind, _KINDS)(clients, config, seed, tested)


def kept(clients: Sequence[Item], config: TaskConfig, seed: int) -> list[Item]:
    """The `config.clients` clients that take part, the first or a random sample, in their order; null: all.

    UserError where there are fewer.
    """
    if config.clients is None:
        return list(clients)
    if not 1 <= config.clients <= len(clients):
        raise UserError(f"task.clients={config.clients}, but the data has {len(clients)} clients; lower it")
    if not config.sample_clients:
        return list(clients[: config.clients])
    drawn = np.random.default_rng(derive(seed, "clients")).choice(len(clients), config.clients, replace=False)
    return [clients[i] for i in sorted(drawn.tolist())]


def _natural(clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool) -> dict[str, ClientData]:
    return clients


def _split(clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool) -> dict[str, ClientData]:
    count = _count(config)
    made = (_shards(client, f"{name}-", count, seed, tested, f"client {name!r}") for name, client in clients.items())
    return {client.client: client for client in chain.from_iterable(made)}


def _iid(clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool) -> dict[str, ClientData]:
    pool = ClientData("all", **{split: tuple(_pooled(clients, split)) for split in SPLITS})
    return {client.client: client for client in _shards(pool, "client", _count(config), seed, tested, "the data")}


def _shards(whole: ClientData, prefix: str, count: int, seed: int, tested: bool, what: str) -> list[ClientData]:
    """`count` clients with equal shares (up to one example) of each split of `whole`."""
    splits = {split: getattr(whole, split) for split in SPLITS}
    sizes = {split: len(examples) for split, examples in splits.items() if examples}
    # Without a test split, one will be held out of each tested client's training examples: it needs two of them.
    halved = tested and not whole.test
    most = min(size // 2 if halved and split == "train" else size for split, size in sizes.items())
    if count > most:
        counts = ", ".join(f"{size} {split}" for split, size in sizes.items())
        raise UserError(
            f"task.partition.clients={count}, but {what} has {counts} examples, enough for {most}; "
            "lower task.partition.clients"
        )
    parts: dict[str, list[list[Any]]] = {}
    for split, examples in splits.items():
        order = np.random.default_rng(derive(seed, "partition", whole.client, split)).permutation(len(examples))
        parts[split] = [[examples[i] for i in part.tolist()] for part in np.array_split(order, count)]
    return [
        ClientData(name, **{split: tuple(parts[split][i]) for split in SPLITS})
        for i, name in enumerate(_names(prefix, count))
    ]


def _dirichlet(
    clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool
) -> dict[str, ClientData]:
    count = _count(config)
    if config.alpha <= 0:
        raise UserError(f"task.partition.alpha={config.alpha}: the concentration must be above 0")
    pool = _interleaved([(split, example) for split in SPLITS for example in _pooled(clients, split)], seed)
    sizes = Counter(split for split, _ in pool)
    labels = [example.group for _, example in pool]
    if len(set(labels)) < 2:
        raise UserError(
            "task.partition.kind=dirichlet needs examples of two labels or more, "
            f"got {sorted(set(labels))}; name the column that holds the label with task.partition.label"
        )
    least = ({"train": 1, "test": 1} if sizes["test"] else {"train": 2}) if tested else {}
    for draw in range(DIRICHLET_DRAWS if count <= sizes["train"] else 0):
        drawn = _dirichlet_parts(np.array(labels), count, config.alpha, derive(seed, "dirichlet", draw))
        parts = [[pool[i] for i in part] for part in drawn]
        if all(sum(split == s for s, _ in part) >= n for part in parts for split, n in least.items()):
            break
    else:
        raise UserError(
            f"no Dirichlet partition found that gives task.partition.clients={count} clients train and test "
            f"examples each ({sizes['train']} train, {sizes['test']} test, {len(set(labels))} labels); "
            f"lower task.partition.clients or raise task.partition.alpha={config.alpha}"
        )
    return {
        name: ClientData(name, **{split: tuple(e for s, e in part if s == split) for split in SPLITS})
        for name, part in zip(_names("client", count), parts, strict=True)
    }


def _dirichlet_parts(labels: np.ndarray, count: int, alpha: float, seed: int) -> list[list[int]]:
    """Indices of each client: every label's are cut by one draw of Dirichlet(alpha), each client's then shuffled.

    The same parts as of flwr-datasets' DirichletPartitioner for this seed, a hundred times faster for 500 clients.
    """
    rng = np.random.default_rng(seed)
    stretches = []  # per label, one of each client
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        cuts = (np.cumsum(rng.dirichlet(np.full(count, alpha))) * len(places)).astype(int)[:-1]
        stretches.append(np.split(places, cuts))
    parts = [np.concatenate(of_client) for of_client in zip(*stretches, strict=True)]
    for part in parts:
        rng.shuffle(part)
    return [part.tolist() for part in parts]


def _interleaved(pool: list[tuple[str, Any]], seed: int) -> list[tuple[str, Any]]:
    """The pool in an order where, within each label, the splits are spread evenly.

    `_dirichlet_parts` cuts each label's examples, as they are ordered, into one stretch per client, so every
    stretch holds train, validation and test in the proportion of the whole.
    """
    kinds = [(split, example.group) for split, example in pool]
    total, seen = Counter(kinds), Counter[tuple[str, str]]()
    keyed = []
    for i in np.random.default_rng(derive(seed, "interleave")).permutation(len(pool)).tolist():
        keyed.append(((seen[kinds[i]] + 0.5) / total[kinds[i]], i))
        seen[kinds[i]] += 1
    return [pool[i] for _, i in sorted(keyed)]


def _count(config: PartitionConfig) -> int:
    if config.clients is None or config.clients < 1:
        raise UserError(f"task.partition.clients={config.clients}; kind={config.kind} needs at least 1")
    return config.clients


def _pooled(clients: dict[str, ClientData], split: str) -> list[Any]:
    return [example for client in clients.values() for example in getattr(client, split)]


def _names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i:0{len(str(count - 1))}d}" for i in range(count)]


_KINDS = {"natural": _natural, "split": _split, "dirichlet": _dirichlet, "iid": _iid}
