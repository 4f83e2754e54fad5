"""What a run in one process can do and a network cannot, and what to set instead."""

from __future__ import annotations

from llm_fed import kinds
from llm_fed.basics.errors import UserError
from llm_fed.settings.config import Config


def check(config: Config) -> None:
    """Refuse what cannot be done over a network. UserError: what, and what to set."""
    kinds.chosen(config).check_network(config)
    if config.task.partition.kind != "natural":
        raise UserError(
            f"task.partition.kind={config.task.partition.kind} divides data among clients, and over a network each "
            "machine names its own; set it to natural"
        )
    if config.adapter and isinstance(config.adapter.rank, tuple) and isinstance(config.network.clients, int):
        raise UserError(
            "a list in adapter.rank goes by the clients' order, which over a network is that of network.clients; list "
            "their names there, or give {client: rank}"
        )
    if config.adapter and config.adapter.start:
        raise UserError(
            "adapter.start: over a network every machine would need those adapters, which is not supported yet; set "
            "it to null, or run in one process"
        )
