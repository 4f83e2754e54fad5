"""Method: what a paper contributes, as seven verbs whose defaults are federated averaging. Read this file first.

A method is a frozen dataclass of hyper-parameters. State goes in, state comes out; nothing is kept on `self`, so what
survives a round is in the server state or in `client.memory` and a checkpoint is complete by construction. Client code
looks like one client's (`await client.fit(...)`) and runs fused for the whole cohort; `client_update` never sees the
server's state, `server_update` never sees a client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llm_fed.merge import mean
from llm_fed.wire import Message

if TYPE_CHECKING:
    from llm_fed.bank import Lora
    from llm_fed.site import Site


@dataclass(frozen=True)
class Upload:
    """One client's answer as the server receives it."""

    client: str
    num_examples: int  # n_i
    staleness: int  # rounds between being asked and arriving; 0 when synchronous
    content: Message


@dataclass(frozen=True)
class Method:
    """Federated averaging of what clients train (McMahan et al. 2017), the default behaviour of every verb."""

    paper: ClassVar[str] = ""  # for model cards and `llm-fed methods`
    needs: ClassVar[tuple[str, ...]] = ()  # names of methods whose results this one starts from

    def wrap(self, structure: Lora, client: Site | None) -> Lora:
        """Which parameters this client has (None: the server), given the run's adapter. Equal structures train
        fused."""
        return structure

    def init(self, server: Site) -> Message:
        """The server's state before round 1: anything that can be serialised."""
        return server.initial()

    def broadcast(self, state: Message, client: str) -> Message:
        """What this client is sent."""
        return state

    async def client_update(self, client: Site, message: Message) -> Message:
        """One client's work in one round; what it returns is uploaded."""
        theta = await client.fit(message)
        return theta - message

    def upload_like(self, message: Message) -> Message:
        """A message with the entries, shapes and dtypes that the upload answering `message` must have."""
        return message

    async def server_update(self, server: Site, state: Message, uploads: list[Upload]) -> Message:
        """The server's step on what arrived this round (perhaps nothing), sorted by (arrival, client)."""
        if not uploads:
            return state
        return state + mean([upload.content for upload in uploads], [upload.num_examples for upload in uploads])

    async def finish(self, client: Site, message: Message) -> None:
        """Once, after the last round, at every client: what it learns here goes into `client.memory`."""

    async def personalize(self, client: Site, message: Message) -> Message:
        """The state that evaluation and export use; computes, never trains, never writes memory."""
        return message

    def report(self, state: Message) -> dict[str, Any]:
        """What of the server's state belongs into metrics.jsonl after each round, as JSON values."""
        return {}
