"""Which examples each client gets by their labels: places in one pool, so that texts and pictures divide alike."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_fed.basics.errors import UserError
from llm_fed.rows.layout import natural_order


def dirichlet(labels: np.ndarray, count: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Places of each of `count` clients: each label's are cut, as they are ordered, by one draw of Dirichlet(alpha).
    The same parts as of flwr-datasets' DirichletPartitioner for this seed, a hundred times faster for 500 clients."""
    rng = np.random.default_rng(seed)
    stretches = []  # per label, one of each client
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        stretches.append(np.split(places, _cuts(rng, count, alpha, len(places))))
    return _shuffled([np.concatenate(of_client) for of_client in zip(*stretches, strict=True)], rng)


def pathological(labels: np.ndarray, count: int, classes: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Places of each of `count` clients that hold `classes` labels each, in counts from Dirichlet(alpha) (FedMoE, 6.1).

    One client after another takes the labels that the fewest hold so far, ties at random: every label has a client, and
    any two labels equally many up to one. A label's places are cut, as they are ordered, by one draw over its clients,
    after each has been given one. UserError where the numbers of labels, clients and examples do not allow it.
    """
    names, label_of = np.unique(labels, return_inverse=True)
    asked = f"task.partition.classes={classes}"
    if not 1 <= classes <= len(names):
        raise UserError(f"{asked}, but the examples have {len(names)} labels; give a number from 1 to {len(names)}")
    if count * classes < len(names):
        raise UserError(
            f"{asked} with task.partition.clients={count} gives {count * classes} places for {len(names)} labels, so "
            "some labels would have no client; raise one of the two"
        )
    rng = np.random.default_rng(seed)
    holds = np.zeros((count, len(names)), bool)
    for client in range(count):
        holds[client, np.lexsort((rng.random(len(names)), holds.sum(0)))[:classes]] = True
    parts: list[list[np.ndarray]] = [[] for _ in range(count)]
    for label, name in enumerate(names):
        places, holders = np.flatnonzero(label_of == label), np.flatnonzero(holds[:, label])
        if len(places) < len(holders):
            raise UserError(
                f"{asked} with task.partition.clients={count} gives the label {str(name)!r} to {len(holders)} clients, "
                f"but it has {len(places)} examples; lower one of the two"
            )
        cuts = _cuts(rng, len(holders), alpha, len(places) - len(holders)) + np.arange(1, len(holders))
        for client, stretch in zip(holders.tolist(), np.split(places, cuts), strict=True):
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
        places = np.flatnonzero(np.isin(labels, block))
        deck = places[np.lexsort((labels[places], splits[places]))]
        parts += [deck[client::size] for client in range(size)]
    return _shuffled(parts, rng)


def _cuts(rng: np.random.Generator, count: int, alpha: float, length: int) -> np.ndarray:
    """Where a line of that length is cut into `count` stretches of a draw of Dirichlet(alpha): (count - 1,) places."""
    return (np.cumsum(rng.dirichlet(np.full(count, alpha))) * length).astype(int)[:-1]


def _shuffled(parts: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    for part in parts:
        rng.shuffle(part)
    return parts
