"""Ranks: which rank each client's adapter has, where `adapter.rank` gives them ranks of their own."""

from __future__ import annotations

from collections.abc import Sequence

from llm_fed.basics.errors import UserError, did_you_mean
from llm_fed.basics.names import same_name
from llm_fed.settings.config import AdapterConfig


def differ(adapter: AdapterConfig | None) -> bool:
    """Whether clients have ranks of their own, be they equal."""
    return adapter is not None and not isinstance(adapter.rank, int)


def largest(adapter: AdapterConfig) -> int:
    """The largest rank that a client has: that of the server's adapter. UserError: the list or mapping is empty."""
    if isinstance(adapter.rank, int):
        return adapter.rank
    ranks = [*adapter.rank.values()] if isinstance(adapter.rank, dict) else [*adapter.rank]
    if not ranks:
        raise UserError("adapter.rank is empty; give one number, a list in the clients' order, or {client: rank}")
    return max(ranks)


def of(adapter: AdapterConfig | None, client: str, index: int) -> int | None:
    """A client's rank; None where the configuration gives no adapter.

    Args:
        place: of the client in their order.

    Raises:
        UserError: the configuration gives this client none.
    """
    if adapter is None:
        return None
    if isinstance(adapter.rank, int):
        return adapter.rank
    if isinstance(adapter.rank, dict):
        if (name := same_name(client, adapter.rank)) is None:
            raise UserError(f"adapter.rank names no rank of client {client}, only of {', '.join(adapter.rank)}")
        return adapter.rank[name]
    if index >= len(adapter.rank):
        raise UserError(
            f"adapter.rank has {len(adapter.rank)} ranks, and {client} is client {index + 1}; give a rank to each"
        )
    return adapter.rank[index]


def check(adapter: AdapterConfig | None, clients: Sequence[str]) -> None:
    """Refuse ranks that are not those of these clients, which are all. UserError: what was given, and what clients
    there are."""
    if adapter is None or isinstance(adapter.rank, int):
        return
    who = f"the {len(clients)} clients are {', '.join(clients[:20])}" + (", ..." if len(clients) > 20 else "")
    if isinstance(adapter.rank, tuple):
        if len(adapter.rank) != len(clients):
            raise UserError(f"adapter.rank has {len(adapter.rank)} ranks, one for each client in their order; {who}")
        return
    for name in adapter.rank:
        if same_name(name, clients) is None:
            raise UserError(f"adapter.rank names {name!r}, which is no client{did_you_mean(name, clients)}; {who}")
    if missing := [name for name in clients if same_name(name, adapter.rank) is None]:
        raise UserError(f"adapter.rank names no rank of {', '.join(missing[:5])}; {who}")
