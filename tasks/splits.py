"""Which examples are held out where data have no split of their own: by the hash of a row, so that a row that is added,
removed or moved changes the split of no other one; and which the server takes for itself."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from itertools import chain

import numpy as np

from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import derive
from llm_fed.settings.config import ServerConfig
from llm_fed.tasks import common
from llm_fed.tasks.common import ClientData, Example, Picture, where
from llm_fed.tasks.record import SERVER, TEST, TRAINING, VALIDATION, Record

log = logging.getLogger(__name__)

BITS = {"train": TRAINING, "validation": VALIDATION, "test": TEST}
NAME = "server"


@dataclass(frozen=True)
class ByContent:
    """By a hash of each row and the seed, so that equal rows are on one side, whosever they are."""

    seed: int  # of the draw
    known: Record | None = None  # rows that keep the split which they had in a run
    server: bool = False  # whether the server takes examples out of the test split, so that those it had belong there

    def hold_out(
        self, clients: Sequence[ClientData], split: str, share: float, beside: Sequence[ClientData] = ()
    ) -> list[ClientData]:
        """On average that share of all rows; of each client with two different rows at least one on each side.

        A row is held out where its draw lies within the share. So equal rows are on one side everywhere, and other rows
        do not matter, except where a client with two different rows or more would lack one of the sides. Then the one
        of its rows that is nearest to the border changes its side, with all that are equal to it. It must not be the
        last training row of another client, so a client may stay without held-out rows, where others hold all of its
        rows. Nobody is left without a training row but clients whose rows are all known from elsewhere, or trained on
        by the clients `beside`.
        """
        if not 0 <= share < 1:
            raise UserError(f"the {split} share is {share}; it must be at least 0 and below 1")
        rows = [common.digests(client.train) for client in clients]
        sizes = [len(own) for own in rows]
        if not any(sizes):
            return list(clients)
        contents, numbers = np.unique(np.concatenate(rows), return_inverse=True)
        draws = common.drawn(contents, derive(self.seed, split))
        out, kept = self._fixed(contents, split, beside)
        chosen = out | ((draws < np.uint64(share * common.WHOLE)) & ~kept)
        if share:
            _both_sides(chosen, draws, ~(out | kept), np.repeat(np.arange(len(rows)), sizes), numbers)
        masks = np.split(chosen[numbers], np.cumsum(sizes)[:-1])
        return [
            dataclasses.replace(client, train=where(client.train, ~own), **{split: where(client.train, own)})
            for client, own in zip(clients, masks, strict=True)
        ]

    def draw(self, pools: Sequence[Sequence[Example | Picture]], count: int, seeds: Sequence[int]) -> list[np.ndarray]:
        """All that the server had in a run that knows them, and then those whose hash comes first; an example takes all
        that are equal to it along, whose pool they are in. What the run knows as tested is not taken, so that there may
        be fewer."""
        rows = [common.digests(pool) for pool in pools]
        contents = [self._first(own, count, seed) for own, seed in zip(rows, seeds, strict=True)]
        taken = np.concatenate(contents or [np.empty(0, np.uint64)])
        return [np.isin(own, taken) for own in rows]

    def _first(self, rows: np.ndarray, count: int, seed: int) -> np.ndarray:
        """The contents of `count` of the rows, or of a few more where the last one comes several times."""
        contents, copies = np.unique(rows, return_counts=True)
        known = self._known(contents)
        had = known & SERVER > 0
        order = np.lexsort((common.drawn(contents, seed), ~had))
        order = order[had[order] | (known[order] & TEST == 0)]
        enough = int(np.searchsorted(np.cumsum(copies[order]), count)) + 1 if count else 0
        return contents[order[: max(enough, int(had.sum()))]]

    def _known(self, contents: np.ndarray) -> np.ndarray:
        """(N,) uint8: the splits in which a run knows these contents; 0: in none."""
        return np.zeros(len(contents), np.uint8) if self.known is None else self.known.splits_of(contents)

    def _fixed(self, contents: np.ndarray, split: str, beside: Sequence[ClientData]) -> tuple[np.ndarray, np.ndarray]:
        """(N,) bool: which contents a run knows as held out for this split, and which as other or as trained."""
        bits = BITS[split] | (SERVER if self.server and split == "test" else 0)
        trains, known = TRAINING | (SERVER & ~bits), self._known(contents)
        trained = [common.digests(client.train) for client in beside]
        # What was trained on is not held out, though an equal row was.
        kept = (known & trains > 0) | np.isin(contents, np.concatenate([np.empty(0, np.uint64), *trained]))
        out = (known & bits > 0) & ~kept
        return out, kept | ((known > 0) & ~out)

    def given(self, clients: dict[str, ClientData], pooled: bool) -> dict[str, ClientData]:
        """The clients with the splits that their data bring, where a row that the run (`known`) knows from another
        split than that in which it now stands is back in that one; one that was on both sides stays. `pooled`: training
        and test examples become one pool afterwards."""
        assert self.known is not None
        tested = not pooled and any(client.test for client in clients.values())
        moved: Counter[tuple[str, str]] = Counter()
        restored = {name: self._back(client, self.known, tested, moved) for name, client in clients.items()}
        for (here, before), count in moved.items():
            log.warning(
                "%d %s example%s of these data belong%s to the %s split, where the run has had %s",
                count, here, *(("", "s", before, "it") if count == 1 else ("s", "", before, "them")),
            )  # fmt: skip
        return restored

    def _back(self, client: ClientData, known: Record, tested: bool, moved: Counter[tuple[str, str]]) -> ClientData:
        """One client of `given`. `tested`: whether the data bring a test split that stays one; `moved` counts the
        examples that go from one split to another."""
        # What is held out afterwards stays among the training examples until then; in a pool they may be test examples.
        open_bits = TRAINING | (0 if client.validation else VALIDATION) | (0 if tested else TEST)
        targets = {}
        for split, bit in BITS.items():
            was = known.splits_of(common.digests(client.splits[split]))
            fits = (open_bits if bit & open_bits else bit) | (SERVER if self.server and split == "test" else 0)
            target = targets[split] = np.full(len(was), bit)
            for other in ("validation", "test", "train"):  # the last counts most
                goes = (was & BITS[other] > 0) & (was & fits == 0)
                target[goes] = TRAINING if BITS[other] & open_bits else BITS[other]
            for other in (other for other in BITS if other != split and (target == BITS[other]).any()):
                moved[split, other] += int((target == BITS[other]).sum())
        if all((target == BITS[split]).all() for split, target in targets.items()):
            return client
        return dataclasses.replace(client, **{
            split: tuple(chain.from_iterable(
                where(client.splits[source], target == bit)
                for source, target in sorted(targets.items(), key=lambda each: each[0] != split)
            ))
            for split, bit in BITS.items()
        })  # fmt: skip


def _both_sides(
    chosen: np.ndarray, draws: np.ndarray, free: np.ndarray, owners: np.ndarray, numbers: np.ndarray
) -> None:
    """Change `chosen` (C,), of the different contents, so that as many clients as possible have rows on both sides.
    `draws` and `free` (C,) are their draws, and whether their sides may change; `owners` and `numbers` (N,) are whose
    each row is, and the number of its content."""
    pairs = np.unique(owners * len(chosen) + numbers)  # of each client the different contents
    owner, number = np.divmod(pairs, len(chosen))
    starts = np.searchsorted(owner, np.arange(owners.max() + 2))

    def own(client: int) -> np.ndarray:
        of_client = number[starts[client] : starts[client + 1]]
        of_client = of_client[free[of_client]]
        return of_client[np.argsort(draws[of_client])]

    sizes = np.diff(starts)
    counts = np.bincount(owner, chosen[number], len(sizes)).astype(int)  # held out
    for client in np.flatnonzero((counts == sizes) & (sizes > 0)).tolist():
        if chosen[number[starts[client] : starts[client + 1]]].all() and len(changeable := own(client)):
            chosen[changeable[-1]] = False
    counts = np.bincount(owner, chosen[number], len(sizes)).astype(int)
    by_number = np.argsort(number, kind="stable")
    holders_from = np.searchsorted(number[by_number], np.arange(len(chosen) + 1))
    lacking = [(own(client), client) for client in np.flatnonzero((counts == 0) & (sizes > 1)).tolist()]
    # In an order that does not depend on the clients' names.
    for candidates, client in sorted(lacking, key=lambda each: draws[each[0][:1]].tolist()):
        for candidate in candidates if counts[client] == 0 else ():
            holders = owner[by_number[holders_from[candidate] : holders_from[candidate + 1]]]
            if (sizes[holders] - counts[holders] > 1).all():
                chosen[candidate] = True
                counts[holders] += 1
                break


def in_domain(
    clients: dict[str, ClientData], config: ServerConfig, seed: int, rule: ByContent
) -> tuple[dict[str, ClientData], ClientData]:
    """The natural clients without the test examples that the server takes, and the server. `config.examples` are drawn
    uniformly from the test examples of all clients together, or of `each`; with `config.test` the others become the
    server's test set. With another task's name nothing is drawn here."""
    count = config.examples if config.name is None and config.examples is not None else 0
    tests = {name: client.test for name, client in clients.items()}
    if config.each:
        for name, test in tests.items():
            _check(count, test, f"client {name!r}")
        masks = rule.draw([*tests.values()], count, [derive(seed, NAME, name) for name in tests])
    else:
        everything = [example for test in tests.values() for example in test]
        _check(count, everything, "the task's test split")
        (mask,) = rule.draw([everything], count, [derive(seed, NAME)])
        masks = np.split(mask, np.cumsum([len(test) for test in tests.values()])[:-1])
    taken = dict(zip(tests, masks, strict=True))
    left = {name: where(test, ~taken[name]) for name, test in tests.items()}
    train = tuple(example for name, test in tests.items() for example in where(test, taken[name]))
    own_test: tuple[Example | Picture, ...] = ()
    if config.test:
        own_test = tuple(chain.from_iterable(left.values()))
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


def _check(count: int, pool: Sized, where: str) -> None:
    if count > len(pool):
        raise UserError(f"task.server.examples={count}, but there are {len(pool)} to take from {where}; lower it")
