"""FedPool: pools the clients whose updates point the same way, and finds out who they are.

No paper yet: docs/fedpool.md derives it. Updates of clients of one kind have more in common than updates of others,
so that their cosines show blocks. In each round the server takes the partition of the clients that describes the
cosines best, and averages within its groups. After the last round each client trains its group's model on its own
examples, and keeps as much of the change as held-out examples ask for.

Letters: m clients that answered so far, k of them in this round, P parameters, K groups of a partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.merge import mean
from llm_fed.merge.mean import WEIGHTS
from llm_fed.method import Client, Message, Method, Server, Site, Upload, averaged, without_share
from llm_fed.settings import AtLeast, AtMost, Below, PositiveFloat
from llm_fed.state import State, stack

_TINY = 1e-12  # squared errors, where cosines are equal
_LEAST = 0.001  # of the probability of a partition; what is less counts as no groups


@dataclass(frozen=True)
class FedPool(Method):
    """FedAvg within groups of clients; the server infers the groups and their number from the clients' updates.

    Messages have the size of FedAvg's, and clients do the same work, a share of it alone after the last round. The
    server keeps two rows per client that answered. With up to six clients it is FedAvg with these steps, as
    so few cosines cannot tell groups apart.
    """

    paper: ClassVar[str] = "FedPool (this project)"

    # how much of what is known of a client's recent updates stays when it answers again
    memory: Annotated[float, AtLeast(0), AtMost(1)] = 0.8
    # how much of the way to where its clients' own updates would have led them a group goes in a round
    catch_up: Annotated[float, AtLeast(0), AtMost(1)] = 0.3
    personal_share: Annotated[float, AtLeast(0), Below(1)] = 0.5  # of a client's steps, those after the last round
    personal_lr: PositiveFloat | None = None  # their learning rate; null: a third of `local.lr`

    def init(self, server: Server) -> Message:
        none = torch.zeros(0, 0, dtype=torch.float64)
        return {
            "mean": server.initial(),  # the model of who never answered
            "groups": [],  # the names of their clients
            "models": [],  # of each group (P,)
            "sizes": {},  # by client, how many examples it counts
            "ahead": {},  # by client, how far its own updates would have led it beyond its model (P,)
            "recent": {},  # by client, what its last updates add up to, apart from those of others (P,)
            "products": none,  # of these rows, (m, m)
            "evidence": none,  # the sum of the products over rounds
            "probable": (1.0, 0.0, []),  # the probability of no groups, and of the most probable groups, with these
        }

    def broadcast(self, state: Message, client: str) -> Message:
        of_all: State = state["mean"]
        return of_all.like(dict(_by_client(state)).get(client, of_all.row))

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        if not uploads:
            return state
        sizes = state["sizes"] | {upload.client: upload.num_examples for upload in uploads}
        recent = dict(state["recent"])
        rows = stack(upload.content for upload in uploads)
        for upload, apart in zip(uploads, rows - rows.mean(0), strict=True):
            known = recent.get(upload.client)
            recent[upload.client] = apart.clone() if known is None else self.memory * known + apart
        products = _products(state["products"], recent, list(dict.fromkeys(upload.client for upload in uploads)))
        evidence = _larger(state["evidence"], len(recent)) + products
        updated = {"sizes": sizes, "recent": recent, "products": products, "evidence": evidence}
        updated["probable"] = none, share, groups = self.probable(updated)
        groups = groups if share > none else [list(recent)]
        # what is no floating-point number, such as BatchNorm's counters, is FedAvg's for all
        like = averaged(server, state["mean"], uploads)
        return updated | self._moved(state, like, sizes, uploads, groups)

    def probable(self, state: Message) -> tuple[float, float, list[list[str]]]:
        """The probability that there are no groups, that of the most probable groups, and their clients."""
        clients, partitions = list(state["recent"]), likely(cosines(state["evidence"]))
        share, groups = max(partitions, key=lambda partition: partition[0], default=(0.0, []))
        return (
            1.0 - sum(each for each, _ in partitions),
            share,
            [[clients[place] for place in group] for group in groups],
        )

    def _moved(
        self, state: Message, like: State, sizes: dict[str, int], uploads: list[Upload], groups: list[list[str]]
    ) -> Message:
        """The models after a round in these groups, and how far each client's updates would have led it beyond them."""
        before, ahead = dict(_by_client(state)), dict(state["ahead"])

        def uploads_of(group: list[str]) -> list[Upload]:
            clients = set(group)
            return [upload for upload in uploads if upload.client in clients]

        def moved(group: list[str], share: float) -> tuple[Tensor, Tensor]:
            """Where those who had answered were on average, a share of the way ahead, and the group's mean update."""
            known = [client for client in group if client in before]
            rows = [before[client] + share * ahead[client] if share else before[client] for client in known]
            model = _weighted(rows, [sizes[client] for client in known], state["mean"].row)
            own = uploads_of(group)
            step = _weighted([u.content.row for u in own], [u.num_examples for u in own], torch.zeros_like(model))
            return model + step, step

        models = []
        for group in groups:
            model, step = moved(group, self.catch_up if len(groups) > 1 else 0.0)
            models.append(model)
            for client in group:
                known = client in before
                ahead[client] = ahead[client] + before[client] + step - model if known else torch.zeros_like(model)
            for upload in uploads_of(group):
                ahead[upload.client] = ahead[upload.client] + upload.content.row - step
        of_all = models[0].clone() if len(models) == 1 else moved(list(sizes), 0.0)[0]
        return {"mean": like.like(of_all), "groups": groups, "models": models, "ahead": ahead}

    def together(self, rounds: int) -> int:
        return without_share(rounds, self.personal_share)

    async def finish(self, client: Client, message: Message) -> None:
        if not client.own_steps:
            return
        lr = client.local.lr / 3 if self.personal_lr is None else self.personal_lr
        own = await client.fit(message, steps=client.own_steps, optimizer=replace(client.optimizer, lr=lr))
        share = await self._own_share(client, message, own)
        client.memory["personal"] = mean([own, message], [share, 1 - share])
        client.memory["recipe"] = {"own_share": share}

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("personal", message)

    async def _own_share(self, client: Client, pooled: State, own: State) -> float:
        """The share of the client's own model whose mixture has the lowest loss on the held-out examples; a half where
        there are none, or where noise hides what is learned of examples."""
        held_out = client.data.held_out
        if not held_out or client.private is not None:
            return 0.5
        losses = await client.losses_of([mean([own, pooled], [share, 1 - share]) for share in WEIGHTS], held_out)
        return min(zip(losses, WEIGHTS, strict=True))[1]

    def pool(self, state: Message) -> list[State]:
        """The model of all, and those of the groups, if there are any: who joins chooses by its examples."""
        of_all: State = state["mean"]
        models = _models(state)
        return [of_all, *(of_all.like(model) for model in models if len(models) > 1)]

    def report(self, state: Message) -> dict[str, Any]:
        none, share, groups = state["probable"]
        summary = {"no_groups": round(none, 4)}
        return {**summary, "groups": groups, "probability": round(share, 4)} if groups else summary


def _weighted(rows: list[Tensor], sizes: list[int], nothing: Tensor) -> Tensor:
    """The mean (P,) of rows by these numbers of examples; of no rows it is `nothing`."""
    total, mean = sum(sizes), torch.zeros_like(nothing)
    for row, size in zip(rows, sizes, strict=True):
        mean += size / total * row
    return mean if rows else nothing


def _models(state: Message) -> list[Tensor]:
    """The groups' models, each (P,).

    Raises:
        UserError: the state is of llm_fed 0.2.0, whose groups had no models of their own.
    """
    if "models" not in state:
        raise UserError(
            "this run of fedpool was begun with llm_fed 0.2.0, which found groups in another way; continue it with "
            "that version, or begin a new run"
        )
    return state["models"]


def _by_client(state: Message) -> Iterator[tuple[str, Tensor]]:
    """Who answered before, each with its group's model (P,)."""
    for model, group in zip(_models(state), state["groups"], strict=True):
        yield from ((client, model) for client in group)


def _products(before: Tensor, rows: dict[str, Tensor], changed: list[str]) -> Tensor:
    """Inner products (m, m), float64, of the rows: those from before, and those of the rows that changed."""
    clients = list(rows)
    places = torch.tensor([clients.index(client) for client in changed])
    anew = torch.stack([rows[client] for client in changed])
    fresh = torch.stack([anew @ row for row in rows.values()]).double()  # (m, k)
    products = _larger(before, len(rows))
    products[:, places], products[places] = fresh, fresh.T
    return products


def _larger(square: Tensor, m: int) -> Tensor:
    """A copy (m, m) with zeros for clients that are new."""
    return torch.nn.functional.pad(square, (0, m - len(square)) * 2)


def cosines(products: Tensor) -> Tensor:
    """(m, m), of rows apart from their mean, from the inner products (m, m) of the rows; 0 of a row without length."""
    products = products - products.mean(0) - products.mean(1, keepdim=True) + products.mean()
    norms = products.diagonal().clamp_min(0).sqrt().clamp_min(1e-30)
    return products / norms[:, None] / norms


def likely(alike: Tensor) -> list[tuple[float, list[list[int]]]]:
    """The partitions into groups of several that describe cosines (m, m) well, with their probabilities.

    The candidates are those of hierarchical clustering with average linkage, one for each K. One is a stochastic block
    model: the cosines within a group have a mean of its own and a variance that all groups share, those between groups
    have one mean and one variance. Its probability is taken as exp(-BIC / 2) over all ways of dividing m clients into
    groups of these sizes. What is missing from one is the probability that there are no groups.
    """
    candidates = list(partitions(alike))
    if not candidates:
        return []
    shares = torch.softmax(-torch.tensor([length for length, _ in candidates], dtype=torch.float64), 0).tolist()
    weighed = zip(shares, candidates, strict=True)
    kept = [(share, of_several(alike, labels)) for share, (_, labels) in weighed if share > _LEAST]
    return [(share, groups) for share, groups in kept if len(groups) > 1]


def of_several(alike: Tensor, labels: Tensor) -> list[list[int]]:
    """The groups of several by their labels (m,), each with those who are alone and most like it; none where more than
    half are alone."""
    groups = [(labels == label).nonzero().flatten().tolist() for label in labels.unique()]
    several, alone = [g for g in groups if len(g) > 1], [g[0] for g in groups if len(g) == 1]
    if len(alone) > len(alike) / 2:
        return []
    nearest = [max(range(len(several)), key=lambda k: float(alike[who, several[k]].mean())) for who in alone]
    for who, k in zip(alone, nearest, strict=True):
        several[k] = [*several[k], who]
    return several


def partitions(alike: Tensor) -> Iterator[tuple[float, Tensor]]:
    """By falling K half the BIC (nats) of a partition with what its labels cost, and the labels (m,)."""
    m = len(alike)
    pairs, upper = m * (m - 1) // 2, alike.triu(1)
    total, squares = float(upper.sum()), float(upper.square().sum())
    linkage, labels = alike.clone().fill_diagonal_(-math.inf), torch.arange(m)
    mean_square = alike.square()  # between groups, as linkage is the mean
    size = torch.ones(m, dtype=torch.float64)
    within, within_squares = torch.zeros(m, dtype=torch.float64), torch.zeros(m, dtype=torch.float64)  # sums, by group
    for _ in range(m - 1):
        a, b = sorted(divmod(int(linkage.argmax()), m))
        for sums, means in ((within, linkage), (within_squares, mean_square)):
            sums[a] += sums[b] + size[a] * size[b] * means[a, b]
            sums[b] = 0
            means[a] = means[:, a] = (size[a] * means[a] + size[b] * means[b]) / (size[a] + size[b])
        linkage[a, a] = -math.inf
        linkage[b] = linkage[:, b] = -math.inf
        size[a], size[b] = size[a] + size[b], 0
        labels[labels == b] = a
        inside = size * (size - 1) / 2
        rest = float((within_squares - within.square() / inside.clamp_min(1)).sum())
        known, groups = int(inside.sum()), int((inside > 0).sum())
        others = squares - float(within_squares.sum()) - (total - float(within.sum())) ** 2 / max(1, pairs - known)
        if (length := description_length(rest, known, groups, others, pairs - known, m)) is not None:
            divisions = math.lgamma(m + 1) - float(torch.lgamma(size[size > 0] + 1).sum())
            yield length + divisions, labels.clone()


def description_length(rest: float, within: int, groups: int, others: float, between: int, m: int) -> float | None:
    """Half the BIC of so many cosines within groups and between them, whose squared errors are `rest` and `others`.

    The variance within groups is taken to be that between them where it would be smaller. None: too few cosines.
    """
    pairs = within + between
    numbers = groups + (between > 0) + 1 + (between > 0)  # means, then variances
    if between and pairs - numbers < 2 * m:
        return None
    if not between or within <= groups or rest / (within - groups) <= others / between:
        numbers -= between > 0
        fit = pairs / 2 * math.log(max(rest + others, _TINY) / pairs)
    else:
        fit = within / 2 * math.log(rest / within) + between / 2 * math.log(max(others, _TINY) / between)
    return fit + numbers / 2 * math.log(pairs)
