"""What methods ask of the server's own examples. No method: what several share."""

from __future__ import annotations

from llm_fed.basics.errors import UserError
from llm_fed.method import Server


def need_examples(server: Server, method: str) -> None:
    """Refuse a server that cannot train the clients' model. UserError: it has no example of its own, or those of
    another task."""
    if not server.train:
        raise UserError(
            f"{method} trains on the server's own examples, but the server has none; set task.server.examples"
        )
    if server.data.foreign:
        raise UserError(f"{method} needs server examples of the clients' own task; leave task.server.name out")
