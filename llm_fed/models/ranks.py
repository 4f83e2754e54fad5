"""Ranks: which rank each client's adapter has, where `adapter.rank` gives them ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llm_fed.basics.errors import UserError, did_you_mean
from llm_fed.basics.names import same_name

Ranks = int | tuple[int, ...] | Mapping[str, int]  # `adapter.rank`


def largest(ranks: Ranks) -> int:
    """The largest rank that a client has: that of the server's adapter. UserError: the list or mapping is empty."""
    each = [ranks] if isinstance(ranks, int) else [*(ranks.values() if isinstance(ranks, Mapping) else ranks)]
    if not each:
        raise UserError("adapter.rank is empty; give one number, a list in the clients' order, or {client: rank}")
    return max(each)


def of(ranks: Ranks, client: str, index: int) -> int:
    """The rank of a client, who has this index in their order. UserError: it is given none."""
    if isinstance(ranks, int):
        return ranks
    if isinstance(ranks, Mapping):
        if (name := same_name(client, ranks)) is None:
            raise UserError(f"adapter.rank names no rank of client {client}, only of {', '.join(ranks)}")
        return ranks[name]
    if index >= len(ranks):
        raise UserError(f"adapter.rank has {len(ranks)} ranks, and {client} is client {index + 1}; give a rank to each")
    return ranks[index]


def check(ranks: Ranks, clients: Sequence[str]) -> None:
    """Refuse ranks that are not those of these clients, who are all. UserError: what was given, and who they are."""
    if isinstance(ranks, int):
        return
    who = f"the {len(clients)} clients are {', '.join(clients[:20])}" + (", ..." if len(clients) > 20 else "")
    if not isinstance(ranks, Mapping):
        if len(ranks) != len(clients):
            raise UserError(f"adapter.rank has {len(ranks)} ranks, one for each client in their order; {who}")
        return
    for name in ranks:
        if same_name(name, clients) is None:
            raise UserError(f"adapter.rank names {name!r}, which is no client{did_you_mean(name, clients)}; {who}")
    if missing := [name for name in clients if same_name(name, ranks) is None]:
        raise UserError(f"adapter.rank names no rank of {', '.join(missing[:5])}; {who}")
