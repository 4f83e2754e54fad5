"""What a method costs: parameters held and sent, counted on its own objects, and bytes moved, read from a run's
metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from llm_fed.method import Method, Upload
from llm_fed.method.requests import Fit, FitHead, Fitted, Gradient, Request, Work, succeeded
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.models.structure import Structure
from llm_fed.runs.reading import finished
from llm_fed.runs.records import read_records
from llm_fed.runtime.local import LocalRuntime
from llm_fed.state import Layout
from llm_fed.state.wire import Message, entries, pack

_TRAINING = ("broadcast", "local", "collect", "server", "finish", "merge")  # parts of timing.jsonl
EMPTY = len(pack(None))  # bytes of a message that says nothing


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters (Table 1 of the FedMerge paper; Figure 7 of its earlier draft)."""

    server: int = 0  # in the server's state: a soup of d models counts d times
    down: int = 0  # in what one client is sent in a round
    up: int = 0  # in what it answers
    client: int = 0  # that a client holds, frozen ones too; of unlike clients the largest


@dataclass(frozen=True)
class Traffic:
    """Bytes on the wire per client; what a failed client was sent is not counted."""

    up_per_round: float = 0.0  # mean over the rounds in which a client was asked
    down_per_round: float = 0.0
    up: float = 0.0  # over the run, mean over all clients
    down: float = 0.0
    total: float = 0.0  # over the run, of all clients together and both ways

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(own + its for own, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class ClientWork:
    """What training took, counted from what was done, and divided by the number of clients; with the server's steps."""

    steps: float  # of an optimizer
    tokens: float  # that these steps have read; of a whole image model pictures
    bytes_up: float
    seconds: float  # of rounds and of what follows the last, without scores and checkpoints

    def __add__(self, other: ClientWork) -> ClientWork:
        return ClientWork(*(own + its for own, its in zip(astuple(self), astuple(other), strict=True)))


def count_parameters(
    method: Method,
    server: Server,
    clients: Mapping[str, Site],
    layout: Callable[[Structure], Layout],
    parents: Sequence[Parameters] = (),
) -> Parameters:
    """What a method holds and sends. Nothing is trained: the server's state is that after one step on answers of the
    right shape from all clients, since some methods keep what they receive. `layout`: the entries of a state of a
    structure. `parents`: counts of the runs that this one merges; what they hold at the server and send counts as its
    own."""
    state = method.init(server)
    held = max(layout(structure).size for structure in {site.structure for site in clients.values()})
    if not (messages := {client: method.broadcast(state, client) for client in method.requested([*clients])}):
        at_server, down, up = (sum(counts) for counts in zip(*((p.server, p.down, p.up) for p in parents), strict=True))
        return Parameters(at_server, down, up, held)
    first, *_ = messages
    answer = method.upload_like(messages[first])
    state = after_a_step(method, server, state, messages)
    later = method.broadcast(state, first)  # some send nothing in round 1 but what is to be trained
    return Parameters(entries(state), max(entries(messages[first]), entries(later)), entries(answer), held)


def after_a_step(method: Method, server: Server, state: Message, messages: Mapping[str, Message]) -> Message:
    """The server's state after one step on answers of the right shape to these messages. Nothing is trained."""
    answers = [Upload(client, 1, 0, method.upload_like(message)) for client, message in messages.items()]
    server.begin(1, 0.0)
    work = {server.id: method.server_update(server, state, answers)}
    return succeeded(LocalRuntime(_Idle(), 1).run(work))[server.id]


class _Idle:
    """An engine whose answers have the right shape for what a server asks, without the work."""

    def execute(self, requests: Sequence[Request[Any]]) -> Sequence[Any]:
        return [_IDLE[type(request)](request) for request in requests]

    def take_work(self) -> Work:
        return Work()


_IDLE: dict[type, Callable[[Any], Any]] = {
    Fit: lambda requested: Fitted(requested.start, (0.0,)),
    Gradient: lambda requested: (0.0, 0.0 * requested.state),
    FitHead: lambda requested: requested.head,
}


def read_traffic(run_dir: Path, last_round: int | None = None) -> Traffic:
    """What a finished run sent and received per client that trains, up to and with `last_round` (default: all).

    Where the server is tested, so that no client has a score, those count that ever answered.
    """
    lines = _lines(run_dir, "client", last_round)
    clients = _clients(run_dir, lines)
    up, down = (sum(line[key] for line in lines) for key in ("bytes_up", "bytes_down"))
    requested = max(1, len(lines))
    return Traffic(up / requested, down / requested, up / clients, down / clients, up + down)


def read_work(run_dir: Path, last_round: int | None = None) -> ClientWork:
    """What a finished run took per client that trains, up to and with `last_round` (default: all)."""
    requested, rounds, ends = (_lines(run_dir, kind, last_round) for kind in ("client", "round", "finish"))
    steps = sum(line.get("steps", 0) for line in [*requested, *ends])
    steps += sum(line.get("server_steps", 0) for line in rounds)
    tokens, up = sum(line["tokens"] for line in [*rounds, *ends]), sum(line["bytes_up"] for line in requested)
    clients = _clients(run_dir, requested)
    return ClientWork(steps / clients, tokens / clients, up / clients, _seconds(run_dir, last_round) / clients)


def _seconds(run_dir: Path, last_round: int | None) -> float:
    """Of training, as timing.jsonl has them; a round that was trained again after a crash counts twice."""
    lines = read_records(run_dir / "timing.jsonl")
    counted = [line for line in lines if last_round is None or line.get("round", math.inf) <= last_round]
    return sum(line.get("parts", {}).get(part, 0.0) for line in counted for part in _TRAINING)


def _lines(run_dir: Path, kind: str, last_round: int | None) -> list[dict[str, Any]]:
    lines = read_records(run_dir / "metrics.jsonl")
    return [line for line in lines if line["kind"] == kind and (last_round is None or line["round"] <= last_round)]


def _clients(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> int:
    """How many clients a finished run has trained; where the server is tested, those that ever answered in `lines`."""
    summary = finished(run_dir)
    known = len(summary["scores"].get("clients", ())) + len(summary["scores"].get("unscored", ()))
    return max(known - len(summary.get("only_tested", ())), len({line["client"] for line in lines}))
