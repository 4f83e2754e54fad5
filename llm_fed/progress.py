"""Progress: where a run stands after a round, and how a checkpoint holds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_fed.inbox import InFlight
from llm_fed.method import Method
from llm_fed.rows import Memory, Row
from llm_fed.site import Site
from llm_fed.wire import Message

if TYPE_CHECKING:
    from llm_fed.checkpoint import Saved
    from llm_fed.run import Run


@dataclass
class Progress:
    """Where a run stands after a round; this is what a checkpoint holds."""

    state: Message
    round: int = 0
    in_flight: list[InFlight] = field(default_factory=list)
    best_round: int = 0  # 0: none yet
    best_score: float = float("-inf")
    elsewhere: Message = None  # of clients whose memories are not in this process: what is known of these


def resume(run: Run, method: Method, clients: Mapping[str, Site], server: Site) -> Progress:
    """The progress of the run's newest checkpoint, or of a run that begins; the sites have their memories."""
    saved = run.checkpoints.latest()
    if saved is None:
        run.rewind(0)
        for _, site in _owners(clients, server):
            site.memory = Memory(run.checkpoints.store)
        return Progress(method.init(server))
    run.rewind(saved.state["metrics"])
    return restore(saved, clients, server)


def save(run: Run, progress: Progress, clients: Mapping[str, Site], server: Site) -> None:
    """Write the checkpoint of `progress.round`, then delete those that are no longer kept."""
    rows: dict[str, Row | Mapping[str, Row]] = {}
    for owner, site in _owners(clients, server):
        assert isinstance(site.memory, Memory)  # since `resume`
        if site.memory:
            rows[owner] = site.memory.rows
    flying = []
    for item in progress.in_flight:
        key = f"flight/{item.asked}/{item.client}"
        rows[key] = item.content
        flying.append([key, item.client, item.asked, item.arrival, item.num_examples, item.expected])
    state = {
        "state": progress.state,
        "best_round": progress.best_round,
        "best_score": progress.best_score,
        "in_flight": flying,
        "elsewhere": progress.elsewhere,
        "metrics": run.mark(),
    }
    run.checkpoints.save(progress.round, state, rows)
    settings = run.config.checkpoint
    newest = run.checkpoints.rounds()[-settings.keep :]
    run.checkpoints.prune(
        lambda round: round in newest or round in settings.keep_rounds or round == progress.best_round
    )


def restore(saved: Saved, clients: Mapping[str, Site], server: Site | None = None) -> Progress:
    """Put what a checkpoint holds back: the memories of the clients and the server, and the rest as it is returned."""
    for owner, site in _owners(clients, server):
        site.memory = saved.memory(owner)
    held, flying = saved.state, []
    for key, client, asked, arrival, examples, expected in held["in_flight"]:
        content = saved.rows[key]
        assert isinstance(content, Row)  # as `save` put it there
        flying.append(InFlight(client, asked, arrival, examples, content, expected))
    return Progress(held["state"], saved.round, flying, held["best_round"], held["best_score"], held.get("elsewhere"))


def _owners(clients: Mapping[str, Site], server: Site | None) -> Iterator[tuple[str, Site]]:
    """The sites whose memories a checkpoint holds, each with the key of its rows there."""
    yield from ((f"memory/{name}", site) for name, site in clients.items())
    if server is not None:
        yield "server", server
