"""Method: what a paper contributes. Read this file first.

A method is a frozen dataclass whose fields are its hyper-parameters. Beside them it has

- steps, whose defaults are federated averaging: `wrap` and `init` before the first round; `broadcast`, `client_update`
  and `server_update` in each round; `finish` after the last; `personalize` wherever a client's model is scored or
  exported;
- declarations, which the rest of llm_fed reads in advance: class attributes, and `pool`, `upload_like`, `requested`,
  `together` and `describe`, which depend on what they are given;
- reports, `report` and `recipe`: what goes into the metrics.

Each step takes a state and returns a state; nothing is kept on `self`. What survives a round is in the server's state
or in `client.memory`, so a checkpoint is always complete. Client code is written for one client, as in
`await client.fit(...)`, and runs fused for the whole cohort. `client_update` never sees the server's state, and
`server_update` never sees a client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import ClassVar, Literal

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError, inert
from llm_fed.basics.rng import derive
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.settings import check_fields
from llm_fed.state import State
from llm_fed.state.roles import Roles
from llm_fed.state.wire import Message

__all__ = ["Client", "Json", "Message", "Method", "Roles", "Server", "Site", "State", "Structure", "Upload"]


@dataclass(frozen=True)
class Upload:
    """One client's answer as the server receives it."""

    client: str
    num_examples: int  # n_i
    staleness: int  # rounds between being asked and arriving; 0 when synchronous
    content: Message


@dataclass(frozen=True)
class Parent:
    """A run whose models are merged (`method.merge`)."""

    name: str  # of its method
    round: int | None = None  # whose models are merged; None: of the one that the run selected
    settings: Mapping[str, Json] = field(default_factory=dict)  # of its method, those that are not its defaults


@dataclass(frozen=True)
class Method:
    """The base class of methods. By default, its steps are federated averaging (McMahan et al. 2017)."""

    # Declarations. What it is:
    paper: ClassVar[str] = ""  # for model cards and `llm-fed methods`
    # What an audit cannot do again, in words. Empty: it trains rounds again.
    unaudited: ClassVar[str] = ""

    # What is trained and what travels, as regular expressions of entries; what does not travel is the client's own.
    trained: ClassVar[str] = r".*"
    shared: ClassVar[str] = r".*"

    # What its uploads hold beside rows of weights, by index: `{"counts": Counts()}`. Anything without a role is refused
    # before round 1 (`llm_fed.state.roles`).
    sends: ClassVar[Roles] = MappingProxyType({})

    # The runs that are trained before this one, which merges their models. A federation has none.
    parents: ClassVar[tuple[Parent, ...]] = ()

    # For what it is made:
    # Whole image models only: the losses of its clients are its own.
    whole_models: ClassVar[bool] = False
    # LoRA adapters only: it trains, sends or merges parts of them.
    adapters_only: ClassVar[bool] = False
    # Clients' models may differ (`base.clients`): what they share does not depend on them.
    any_model: ClassVar[bool] = False
    # Clients' adapters may differ in rank (`adapter.rank`); at the server `site.structures` says which they are.
    any_rank: ClassVar[bool] = False
    # A client may start from a model of its own (`adapter.start`), as nothing is shared.
    own_start: ClassVar[bool] = False

    # What a client's step does that is for held-out examples, if the client has none, in words. Empty: no step is, or
    # it can do without.
    without_held_out: ClassVar[str] = ""

    # What a run may rely on:
    # One model for all: what `broadcast` sends to any client, so that the server can test it on data of its own.
    one_model: ClassVar[bool] = False
    # A control and no federation: its server is given the training examples of all clients.
    gathers: ClassVar[bool] = False
    # The server's step needs nothing of the uploads but their mean, if all count alike (`privacy.where=server`).
    mean_only: ClassVar[bool] = False
    # The server's step needs nothing of a round's uploads but their mean, weighed by numbers of `examples` or all
    # `clients` alike, and how many they are (`privacy.secure`); with `mean_only` that is known.
    summed: ClassVar[Literal["examples", "clients"] | None] = None
    # A server's step of its own takes its means by `server.average`, so that `server.aggregation` decides how; the step
    # that is inherited from here does.
    robust: ClassVar[bool] = False
    # Its clients use their examples for more than `client.fit`, so that noise in the steps of training does not cover
    # all that they learn of them (`privacy.unit=example`).
    looks: ClassVar[bool] = False
    # What it does in a round depends on how many rounds there are (`site.rounds`), so that an extended run is unlike a
    # longer one.
    by_rounds: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Refuse hyper-parameters of a wrong type or out of range; override it to check how two of them relate.
        UserError: the first bad value, and what it must be."""
        check_fields(self, "method.")

    # Steps before the first round.

    def wrap(self, structure: Structure, client: Client | None) -> Structure:
        """The parameters of this client's model (None: the server's), given the run's structure. Clients with equal
        structures train fused."""
        return structure

    def init(self, server: Server) -> Message:
        """The server's state before round 1: anything that can be serialised."""
        return server.initial().select(self.shared)

    # Steps of a round.

    def broadcast(self, state: Message, client: str) -> Message:
        """The message that this client receives in a round."""
        return state

    async def client_update(self, client: Client, message: Message) -> Message:
        """One client's work in one round. The returned message is uploaded."""
        theta = await client.fit(client.assemble(message), train=self.trained)
        client.keep(theta, self.trained, message)
        return theta.select(self.shared) - message

    async def server_update(self, server: Server, state: Message, uploads: list[Upload]) -> Message:
        """The server's step on the uploads that arrived in this round (perhaps none), sorted by (arrival, client)."""
        return averaged(server, state, uploads)

    # Steps after the last round; clients are also scored, by `personalize`, in rounds before it.

    async def finish(self, client: Client, message: Message) -> None:
        """Runs once at every client, after the last round. It keeps its results in `client.memory`."""

    async def personalize(self, client: Site, message: Message) -> Message:
        """The state that is evaluated and exported. It must not train, and must not write to `client.memory`."""
        return client.assemble(message)

    # Declarations that depend on a message, on the server's state or on hyper-parameters.

    def pool(self, state: Message) -> Sequence[State]:
        """The server's models that are merged for a client that joins after the last round. Empty: the clients' final
        models are merged instead."""
        return ()

    def upload_like(self, message: Message) -> Message:
        """A message with the entries, shapes and dtypes that the upload answering `message` must have; of a whole
        number also its largest value (`Index`), or its only one (`Echo`)."""
        return message

    def requested(self, clients: Sequence[str]) -> Sequence[str]:
        """Those of the clients that its rounds may ask."""
        return clients

    def together(self, rounds: int) -> int:
        """Of a run's rounds those that clients train together; in `finish` each then takes the steps of the others
        (`client.own_steps`)."""
        return rounds

    def describe(self, rounds: int) -> str:
        """What a run of so many rounds does."""
        return f"{rounds:,} round{'' if rounds == 1 else 's'}"

    # Reports.

    def report(self, state: Message) -> dict[str, Json]:
        """What to write about the server's state into metrics.jsonl after each round, as JSON values."""
        return {}

    def recipe(self, client: Site) -> dict[str, Json]:
        """What `finish` found, as JSON values, for metrics.jsonl and the model card. A `note` is also printed."""
        return client.memory.get("recipe", {})


def without_share(rounds: int, share: float) -> int:
    """ceil((1 - share) rounds), at least one."""
    return max(1, math.ceil((1 - share) * rounds - 1e-9))  # (1 - 0.7) * 10 is a little above 3


def mean_update(server: Server, uploads: Sequence[Upload]) -> State:
    """The mean of the updates, weighted by numbers of examples."""
    return server.average([upload.content for upload in uploads], [upload.num_examples for upload in uploads])


def averaged(server: Server, state: State, uploads: list[Upload]) -> State:
    """FedAvg's step: the state plus the mean of the updates. No updates: the state."""
    return state + mean_update(server, uploads) if uploads else state


def by_arrival(server: Server, uploads: list[Upload]) -> list[Upload]:
    """The uploads of one round in the order of their arrival, for methods that depend on it. Virtual time is counted in
    rounds, so the order within a round is random: it depends only on (seed, round, client). In client order, the same
    clients would always come first."""
    return sorted(uploads, key=lambda upload: derive(server.seed, "arrival", server.round, upload.client))


def refuse_inert(method: Method, setting: str, counts: bool, beside: str) -> None:
    """For `init`: refuse a hyper-parameter that is not its default where it does not count.

    Args:
        counts: whether it changes anything.
        beside: beside which settings it would.
    """
    value, (default,) = asdict(method)[setting], [own.default for own in fields(method) if own.name == setting]
    if not counts and value != default:
        raise inert(f"method.{setting}", value, beside)


def refuse_proximal(server: Server, method: str, setting: str) -> None:
    """For `init` of a method whose own proximal term has the strength `setting`: UserError where there is another."""
    if server.local.proximal:
        raise UserError(f"{method} has a proximal term of its own, of strength {setting}; leave local.proximal out")
