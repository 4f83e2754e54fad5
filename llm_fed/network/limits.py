"""What a run in one process can do and a network cannot, and what to set instead."""

from __future__ import annotations

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.federation.privacy import check_elsewhere
from llm_fed.settings.config import Config


def check(config: Config) -> None:
    """Refuse what cannot be done over a network.

    Raises:
        UserError: what, and what to set.
    """
    if tasks.find(config.task.name).images:
        if tasks.images.labels_of(config.task) is None:
            raise UserError(
                f"task.name={config.task.name}: over a network no machine sees all pictures, so task.labels must name "
                "all classes, e.g. task.labels=[cat,dog]"
            )
        if config.task.image_size is None:
            raise UserError("over a network the server sees no picture; set task.image_size to their height and width")
        if config.task.partition.kind != "natural":
            raise UserError(
                f"task.partition.kind={config.task.partition.kind} divides pictures that are all here; over a network "
                "each client is a folder or a domain of its machine's data: set it to natural"
            )
        if config.base.clients and isinstance(config.network.clients, int):
            raise UserError(
                "base.clients goes by the clients' order, which over a network is that of network.clients; list their "
                "names there"
            )
    check_elsewhere(config.privacy)
    if config.adapter and isinstance(config.adapter.rank, tuple) and isinstance(config.network.clients, int):
        raise UserError(
            "a list in adapter.rank goes by the clients' order, which over a network is that of network.clients; list "
            "their names there, or give {client: rank}"
        )
    if config.eval.base is True:
        raise UserError(
            "eval.base=true is for runs in one process or under accelerate launch: over a network clients score only "
            "what they are sent; set eval.base=auto"
        )
    if config.adapter and config.adapter.start:
        raise UserError(
            "adapter.start: over a network every machine would need those adapters, which is not supported yet; set "
            "it to null, or run in one process"
        )
