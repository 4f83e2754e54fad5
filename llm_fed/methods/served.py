"""What the methods share whose server has one adapter of the largest rank and sends each client its part. No method
itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_fed.merge.factors import rank_of, resized
from llm_fed.method import Server, State

Clients = Mapping[str, Any]  # by name {"rank": r, "factor": the server's scaling over the client's}


def clients_of(server: Server) -> Clients:
    """Of the clients whose adapters differ from the server's."""
    return {
        name: {"rank": structure.rank, "factor": server.structure.scaling / structure.scaling}
        for name, structure in sorted(server.structures.items())
    }


def of(clients: Clients, client: str, model: State) -> tuple[int, float]:
    """(rank, factor) of a client."""
    own = clients.get(client, {"rank": rank_of(model), "factor": 1.0})
    return own["rank"], own["factor"]


def part(model: State, clients: Clients, client: str) -> State:
    """The first components of the server's adapter, as many as the client's has, in the client's scaling."""
    return resized(model, *of(clients, client, model))
