"""Which examples belong to whom, of texts and pictures alike: natural clients, several of each of them, iid, or by
label; tests of a share each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from itertools import chain

import numpy as np

from llm_fed.basics.errors import UserError, lookup
from llm_fed.basics.rng import derive
from llm_fed.rows.layout import natural_order
from llm_fed.settings import check_fields
from llm_fed.settings.config import PartitionConfig, TaskConfig
from llm_fed.tasks.common import ClientData, Example, Item, Picture
from llm_fed.tasks.splits import ByContent

SPLITS = ("train", "validation", "test")
DRAWS = 20  # tries until every client has examples to train and to be tested on
OWN = {"classes": "pathological", "sizes": "cluster"}  # settings that one kind needs and no other takes


def partition(
    clients: dict[str, ClientData],
    config: PartitionConfig,
    seed: int,
    tested: bool = True,
    rule: ByContent | None = None,
    beside: Sequence[ClientData] = (),
) -> dict[str, ClientData]:
    """The clients that `config.kind` makes of the natural ones, reproducible by seed; every example goes to one client.

    - natural: unchanged (a client per folder, task, or id; the loaders group by id).
    - split: `config.clients` clients of each natural client, with disjoint examples in every split.
    - iid: all examples of each split, shuffled and cut into equal parts.
    - dirichlet: for each label (`group` of an example), the clients' shares are one draw of Dirichlet(alpha), the
      same for train, validation and test up to rounding: a client is tested on the mixture it trains on.
    - pathological: `config.classes` labels per client, divided like that (`pathological`).
    - cluster: an equal part of the labels for each of the clusters, whose numbers of clients `config.sizes` says, and
      of their examples for each of its clients, named cluster0-client00 and so on (`cluster`).

    With `config.test` train and test are one pool, and that share of what a client gets becomes its test split (FedMoE,
    Sec. 6.1: 8 : 2), as the `rule` says (default: by content and `seed`), but for what others `beside` train on. Unless
    the clients are `tested`, no test split is needed, and the first draw counts, even where it gives a client nothing.
    UserError if there is too little data for so many clients.
    """
    check_fields(config, "task.partition.")
    make = lookup("task.partition.kind", config.kind, KINDS)
    for name, kind in OWN.items():
        value = getattr(config, name)
        if (value is not None) != (config.kind == kind):
            raise UserError(
                f"task.partition.{name}={value} with kind={config.kind}: kind={kind} needs a value, no other takes one"
            )
    if config.test is None:
        return make(clients, config, seed, tested)
    pooled = {name: dataclasses.replace(c, train=c.train + c.test, test=()) for name, c in clients.items()}
    made = list(make(pooled, config, seed, tested).values())
    after = dataclasses.replace(rule or ByContent(seed), server=False)  # it has its own, but for rows that have moved
    return {client.client: client for client in after.hold_out(made, "test", config.test, beside)}


def kept(clients: Sequence[Item], config: TaskConfig, seed: int) -> list[Item]:
    """The `config.clients` clients that take part, the first or a random sample, in their order; null: all."""
    if config.clients is None:
        return list(clients)
    if not 1 <= config.clients <= len(clients):
        raise UserError(f"task.clients={config.clients}, but the data has {len(clients)} clients; lower it")
    if not config.sample_clients:
        return list(clients[: config.clients])
    drawn = np.random.default_rng(derive(seed, "clients")).choice(len(clients), config.clients, replace=False)
    return [clients[i] for i in sorted(drawn.tolist())]


def _split(clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool) -> dict[str, ClientData]:
    count = _count(config)
    made = (_shards(client, f"{name}-", count, seed, tested, f"client {name!r}") for name, client in clients.items())
    return {client.client: client for client in chain.from_iterable(made)}


def _iid(clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool) -> dict[str, ClientData]:
    pool = ClientData("all", **{split: _pooled(clients, split) for split in SPLITS})
    return {client.client: client for client in _shards(pool, "client", _count(config), seed, tested, "the data")}


def _shards(whole: ClientData, prefix: str, count: int, seed: int, tested: bool, what: str) -> list[ClientData]:
    """`count` clients with equal shares (up to one example) of each split of `whole`."""
    sizes = {split: len(examples) for split, examples in whole.splits.items() if examples}
    # Without a test split, one will be held out of each tested client's training examples: it needs two of them.
    halved = tested and not whole.test
    most = min((size // 2 if halved and split == "train" else size for split, size in sizes.items()), default=0)
    if count > most:
        counts = ", ".join(f"{size} {split}" for split, size in sizes.items()) or "no"
        raise UserError(
            f"task.partition.clients={count}, but {what} has {counts} examples, enough for {most}; "
            "lower task.partition.clients"
        )
    parts: dict[str, list[Sequence[Example | Picture]]] = {}
    for split, examples in whole.splits.items():
        order = np.random.default_rng(derive(seed, "partition", whole.client, split)).permutation(len(examples))
        parts[split] = [tuple(examples[index] for index in part) for part in np.array_split(order, count)]
    return [
        ClientData(name, **{split: parts[split][i] for split in SPLITS}) for i, name in enumerate(_names(prefix, count))
    ]


def _draw(config: PartitionConfig, labels: np.ndarray, splits: np.ndarray, seed: int) -> list[np.ndarray]:
    """Places of each client's examples."""
    if config.kind == "cluster":
        return cluster(labels, splits, config.sizes or (), seed)
    if config.kind == "dirichlet":
        return dirichlet(labels, _count(config), config.alpha, seed)
    return pathological(labels, _count(config), config.classes or 0, config.alpha, seed)


def _names_by_label(config: PartitionConfig) -> list[str]:
    if config.sizes is None:
        return _names("client", _count(config))
    count = sum(config.sizes)
    if config.clients not in (None, count):
        raise UserError(
            f"task.partition.clients={config.clients}, but task.partition.sizes has {count}; leave clients out"
        )
    clusters = np.repeat(_names("cluster", len(config.sizes)), config.sizes)
    return [f"{of}-{name}" for of, name in zip(clusters, _names("client", count), strict=True)]


def _by_label(
    clients: dict[str, ClientData], config: PartitionConfig, seed: int, tested: bool
) -> dict[str, ClientData]:
    names = _names_by_label(config)
    pool = _interleaved([(split, example) for split in SPLITS for example in _pooled(clients, split)], seed)
    splits, labels = np.array([split for split, _ in pool]), np.array([example.group for _, example in pool])
    sizes, count = Counter(splits.tolist()), len(names)
    if len(known := np.unique(labels)) < 2:
        raise UserError(
            f"task.partition.kind={config.kind} needs examples of two labels or more, "
            f"got {known.tolist()}; name the column that holds the label with task.partition.label"
        )
    least = ({"train": 1, "test": 1} if sizes["test"] else {"train": 2}) if tested else {}
    for attempt in range(DRAWS if count <= sizes["train"] else 0):
        parts = _draw(config, labels, splits, derive(seed, config.kind, attempt))
        if all(np.count_nonzero(splits[part] == split) >= n for part in parts for split, n in least.items()):
            break
    else:
        fewer, evener = ("sizes", "") if config.sizes else ("clients", f" or raise task.partition.alpha={config.alpha}")
        requested = f"task.partition.{fewer}={config.sizes or config.clients}"
        raise UserError(
            f"no {config.kind} partition found that gives {requested} clients "
            f"train and test examples each ({sizes['train']} train, {sizes['test']} test, {len(known)} labels); "
            f"lower task.partition.{fewer}{evener}"
        )
    return {
        name: ClientData(name, **{split: tuple(pool[i][1] for i in part if splits[i] == split) for split in SPLITS})
        for name, part in zip(names, parts, strict=True)
    }


def _interleaved(pool: list[tuple[str, Example | Picture]], seed: int) -> list[tuple[str, Example | Picture]]:
    """The pool in an order where, within each label, the splits are spread evenly: where a label's examples are cut, as
    they are ordered, into one stretch per client, every stretch then holds train, validation and test as the whole
    does."""
    kinds = [(split, example.group) for split, example in pool]
    total, seen = Counter(kinds), Counter[tuple[str, str]]()
    keyed = []
    for i in np.random.default_rng(derive(seed, "interleave")).permutation(len(pool)).tolist():
        keyed.append(((seen[kinds[i]] + 0.5) / total[kinds[i]], i))
        seen[kinds[i]] += 1
    return [pool[i] for _, i in sorted(keyed)]


def _count(config: PartitionConfig) -> int:
    if config.clients is None:
        raise UserError(f"task.partition.clients={config.clients}; kind={config.kind} needs at least 1")
    return config.clients


def _pooled(clients: dict[str, ClientData], split: str) -> Sequence[Example | Picture]:
    parts = [client.splits[split] for client in clients.values()]
    return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts))


def _names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i:0{len(str(count - 1))}d}" for i in range(count)]


KINDS = {
    "natural": lambda clients, config, seed, tested: clients,
    "split": _split,
    "dirichlet": _by_label,
    "iid": _iid,
    "pathological": _by_label,
    "cluster": _by_label,
}


def dirichlet(labels: np.ndarray, count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Places of each of `count` clients: each label's are cut, as they are ordered, by one draw of Dirichlet(alpha).
    The same parts as of flwr-datasets' DirichletPartitioner for this seed, a hundred times faster for 500 clients."""
    rng = np.random.default_rng(seed)
    by_label = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    stretches = [np.split(own, _cuts(rng, count, alpha, len(own))) for own in by_label]  # per label, one of each client
    return _shuffled([np.concatenate(of_client) for of_client in zip(*stretches, strict=True)], rng)


def pathological(labels: np.ndarray, count: int, classes: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Places of each of `count` clients that hold `classes` labels each, in counts from Dirichlet(alpha) (FedMoE, 6.1).

    One client after another takes the labels that the fewest hold so far, ties at random: every label has a client, and
    any two labels equally many up to one. A label's indices are cut, as they are ordered, by one draw over its clients,
    after each has been given one. UserError where the numbers of labels, clients and examples do not allow it.
    """
    names, label_of = np.unique(labels, return_inverse=True)
    requested = f"task.partition.classes={classes}"
    if not 1 <= classes <= len(names):
        raise UserError(f"{requested}, but the examples have {len(names)} labels; give a number from 1 to {len(names)}")
    if count * classes < len(names):
        raise UserError(
            f"{requested} with task.partition.clients={count} gives {count * classes} places for {len(names)} labels, "
            "so some labels would have no client; raise one of the two"
        )
    rng = np.random.default_rng(seed)
    holds = np.zeros((count, len(names)), bool)
    for client in range(count):
        holds[client, np.lexsort((rng.random(len(names)), holds.sum(0)))[:classes]] = True
    parts: list[list[np.ndarray]] = [[] for _ in range(count)]
    for label, name in enumerate(names):
        indices, holders = np.flatnonzero(label_of == label), np.flatnonzero(holds[:, label])
        if len(indices) < len(holders):
            raise UserError(
                f"{requested} with task.partition.clients={count} gives the label {str(name)!r} to {len(holders)} "
                f"clients, but it has {len(indices)} examples; lower one of the two"
            )
        cuts = _cuts(rng, len(holders), alpha, len(indices) - len(holders)) + np.arange(1, len(holders))
        for client, stretch in zip(holders.tolist(), np.split(indices, cuts), strict=True):
            parts[client].append(stretch)
    return _shuffled([np.concatenate(part) for part in parts], rng)


def cluster(labels: np.ndarray, splits: np.ndarray, sizes: Sequence[int], seed: int) -> list[np.ndarray]:
    """Places of each client of `len(sizes)` clusters with `sizes` clients (FedMerge, cluster non-IID).

    The labels in natural order are cut into equally long blocks up to one label, a block for each cluster. Its examples
    are dealt out to its clients like cards, split by split, label by label and then as they are ordered, so that they
    have equally many of each up to one. UserError for fewer labels than clusters.
    """
    names = sorted(set(labels.tolist()), key=natural_order)
    if len(names) < len(sizes):
        raise UserError(
            f"task.partition.sizes={list(sizes)} asks for {len(sizes)} clusters, but the examples have {len(names)} "
            "labels; give fewer clusters"
        )
    rng, parts = np.random.default_rng(seed), []
    for block, size in zip(np.array_split(np.array(names), len(sizes)), sizes, strict=True):
        indices = np.flatnonzero(np.isin(labels, block))
        deck = indices[np.lexsort((labels[indices], splits[indices]))]
        parts += [deck[client::size] for client in range(size)]
    return _shuffled(parts, rng)


def _cuts(rng: np.random.Generator, count: int, alpha: float, length: int) -> np.ndarray:
    """Where a line of that length is cut into `count` stretches of a draw of Dirichlet(alpha): (count - 1,) indices."""
    return (np.cumsum(rng.dirichlet(np.full(count, alpha))) * length).astype(int)[:-1]


def _shuffled(parts: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    for part in parts:
        rng.shuffle(part)
    return parts
