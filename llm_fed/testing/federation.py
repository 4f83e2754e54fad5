"""The federations in which the battery tries a method: real ones, only small.

Adapters of a LLaMA of two layers, or whole ResNets, in float64; three clients with different answers or classes and
numbers of examples, of which the server has two each; the local runtime, the round loop, the run folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from llm_fed import kinds, methods
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.bench.build import check_kinds
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, federate
from llm_fed.federation.schedule import Delayed, Schedule
from llm_fed.kinds import Kind
from llm_fed.kinds.language import Language
from llm_fed.method import Method, Upload
from llm_fed.method.client import Client
from llm_fed.method.server import Server
from llm_fed.method.site import Data
from llm_fed.models.lora import Lora, draw
from llm_fed.models.structure import Full, Structure
from llm_fed.runs.folder import Run
from llm_fed.runs.records import read_records
from llm_fed.runtime.local import LocalRuntime
from llm_fed.settings.config import Config, LocalConfig
from llm_fed.settings.configfile import from_dict, overlay
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.state import State
from llm_fed.state.wire import Message, pack, unpack
from llm_fed.tasks.common import TaskData
from llm_fed.testing import tiny

ROUNDS = 3
SIZES = {"c0": 5, "c1": 3, "c2": 8}  # examples of each client


class Stopped(KeyboardInterrupt):
    """A run was killed where it was told to be."""


@dataclass(frozen=True)
class Setup:
    """What a federation trains, and on what."""

    words: str
    base: Callable[[torch.dtype], Kind]
    structure: Structure
    local: LocalConfig
    examples: Callable[[int, int], list[Any]]  # of (client, how many)
    fused: bool  # whether clients train in one pass
    falls: float  # by how much the loss falls at least, from the first round to the last
    least: int  # bytes of a message
    config: Mapping[str, Json]  # the sections of a configuration that ask for such models
    labels: tuple[str, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)  # of clients' adapters, where it is not the structure's
    objective: ObjectiveConfig = ObjectiveConfig()  # the loss

    def training(self, words: Sequence[str]) -> Setup:
        """The same with `local.key=value` words laid over how clients train. UserError: a word that a configuration
        would refuse, too."""
        return replace(self, local=overlay(replace(Config(), local=self.local), words, "the method").local)

    def structure_of(self, id: str) -> Structure:
        """What a site trains; the server's adapter has the largest rank."""
        if not self.ranks:
            return self.structure
        adapter: Any = self.structure
        return replace(adapter, rank=self.ranks.get(id, max(self.ranks.values())))

    def refusal(self, method: Method, settings: Mapping[str, Json]) -> str:
        """Why the method does not train such models, in its words; empty where it does."""
        config = from_dict({**self.config, "method": dict(settings)})
        metric = "accuracy" if self.labels else "rouge1"
        task = TaskData(config.task.name, metric, {}, self.labels)
        kind = kinds.of(config.base, task.base_kind)
        try:
            check_kinds(kind, config, task, method, metric)
        except UserError as error:
            return str(error)
        return ""


@cache
def language_base(dtype: torch.dtype = torch.float64) -> Language:
    """The base of the adapters; it is never changed."""
    return tiny.language_base(tiny.drawn(tiny.llama, 0).to(dtype).eval())


def fresh(base: Kind, structure: Structure, dtype: torch.dtype, generator: torch.Generator) -> State:
    """A draw of a base. Whoever asks gets a copy of a whole model, which takes as long to draw as to train for a step,
    while the federations of a method ask for the same ones."""
    if isinstance(base, Language) and isinstance(structure, Lora):
        return draw(base.model, structure, generator, dtype=dtype)
    if structure.fused:
        return base.draw(structure, generator)
    state = _whole(dtype, structure, generator.initial_seed())
    return State(state.layout, state.row.clone(), {name: value.clone() for name, value in state.extras.items()})


@cache
def _whole(dtype: torch.dtype, structure: Structure, seed: int) -> State:
    return MODELS.base(dtype).draw(structure, torch.Generator().manual_seed(seed))


STRUCTURE = Lora(rank=2, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj"))
ADAPTERS = Setup(
    "adapters of a LLaMA", language_base, STRUCTURE, LocalConfig(steps=3, batch_size=2, lr=0.05),
    tiny.answers, fused=True, falls=0.3, least=1000,
    config={},
)  # fmt: skip
MODELS = Setup(
    "whole ResNets", cache(partial(tiny.architecture, "resnet-9")), Full(),
    LocalConfig(steps=3, batch_size=4, lr=0.003, optimizer="adam"),
    tiny.pictures_of, fused=False, falls=0.02, least=100,
    config={"adapter": None, "task": {"name": "images"}}, labels=tuple(map(str, range(tiny.CLASSES))),
)  # fmt: skip


@dataclass
class Outcome:
    """A federation after its last round."""

    settings: Mapping[str, Json]  # of the method
    setup: Setup
    method: Method
    server: Server
    clients: dict[str, Client]
    runtime: LocalRuntime
    state: Message
    folder: Path

    def again(self, folder: Path, **changes: Any) -> Outcome:
        """The same federation with other options of `go`."""
        return go(self.settings, self.setup, folder, **changes)

    @property
    def metrics(self) -> bytes:
        return (self.folder / "metrics.jsonl").read_bytes()

    def records(self, kind: str) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl of one kind."""
        return [line for line in read_records(self.folder / "metrics.jsonl") if line["kind"] == kind]

    @property
    def memories(self) -> dict[str, bytes]:
        """Everybody's, packed."""
        return {site.id: pack(dict(site.memory)) for site in (self.server, *self.clients.values())}

    def losses(self) -> list[float]:
        """The mean training loss of each round in which somebody trained."""
        return [line["loss"] for line in self.records("round") if "loss" in line]

    def curve(self) -> list[float]:
        """The rounds' losses, and that of the training in `finish` where a method has some."""
        self.ask("finish", self.messages())
        last = [loss for site in self.clients.values() for loss in site.losses]
        return self.losses() + ([round(fmean(last), 5)] if last else [])

    def messages(self) -> dict[str, Message]:
        """What each client would be sent next, in memory of its own."""
        return {name: unpack(pack(self.method.broadcast(self.state, name))) for name in self.clients}

    def ask(self, verb: str, messages: Mapping[str, Message]) -> dict[str, Message]:
        """What an awaitable verb of the method returns at every client, in the round after the last."""
        for site in self.clients.values():
            site.begin(ROUNDS + 1, self.setup.local.lr)
        work = {name: getattr(self.method, verb)(site, messages[name]) for name, site in self.clients.items()}
        outcomes = self.runtime.run(work)
        for outcome in outcomes.values():
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def uploads(self) -> list[Upload]:
        answers = self.ask("client_update", self.messages())
        return [Upload(name, self.clients[name].num_examples, 0, answer) for name, answer in answers.items()]

    def serve(self, state: Message, uploads: list[Upload]) -> Message:
        """The server's step; its memory is put back."""
        self.server.begin(ROUNDS + 1, self.setup.local.lr)
        before = copy(self.server.memory)
        (outcome,) = self.runtime.run({"server": self.method.server_update(self.server, state, uploads)}).values()
        self.server.memory = before
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @contextmanager
    def undone(self) -> Iterator[None]:
        """What the clients are asked within it leaves their memories as they were."""
        before = {name: copy(site.memory) for name, site in self.clients.items()}
        try:
            yield
        finally:
            for name, site in self.clients.items():
                site.memory = before[name]


def go(
    settings: Mapping[str, Json],
    setup: Setup,
    folder: Path,
    *,
    seed: int = 0,
    per_pass: int = len(SIZES),
    order: tuple[str, ...] = tuple(SIZES),
    stop_after: int | None = None,
    dtype: torch.dtype = torch.float64,
    schedule: Schedule | None = None,
    rounds: int = ROUNDS,
    sizes: Mapping[str, int] | None = None,
) -> Outcome:
    """Run, or continue, a federation of the method that `settings` describe. Stopped: it was to die. UserError: the
    method refuses its settings, or such models. RunError: every client failed.

    Args:
        rounds: those that clients train together.
        stop_after: the round after which it dies, in the middle of the next one that asks anybody.
        sizes: by client (c0, c1, ...) of `order`, the number of its examples (default: SIZES).
    """
    method, model, sizes = methods.build(settings), setup.base(dtype), sizes or SIZES
    alone = next(whole for whole in count(rounds) if method.together(whole + 1) > rounds) - rounds

    def parts(structure: Structure) -> dict[str, Any]:
        return {"structure": structure, "draw": partial(fresh, model, structure, dtype)}

    def data(train: list[Any]) -> Data:
        return Data(train, num_labels=tiny.CLASSES)

    def client(id: str) -> Client:
        plain = setup.structure_of(id)
        examples = data(setup.examples(int(id[1:]), sizes[id]))
        made = Client(
            id, **parts(plain), local=setup.local, seed=seed, data=examples, rounds=rounds, objective=setup.objective,
            alone=alone,
        )  # fmt: skip
        return replace(made, **parts(method.wrap(plain, made)))

    def listen(record: Mapping[str, Any]) -> None:
        if stop_after and record["kind"] == "client" and record["round"] > stop_after:
            raise Stopped

    clients = {id: client(id) for id in order}
    runtime = LocalRuntime(model.engine(), per_pass)
    server = Server(
        "server", **parts(method.wrap(setup.structure_of("server"), None)), local=setup.local, seed=seed,
        data=data([example for client in range(len(SIZES)) for example in setup.examples(client, 2)]), rounds=rounds,
        clients=tuple(sorted(order)), cohort=len(order), objective=setup.objective,
        structures={id: clients[id].structure for id in sorted(order)} if setup.ranks else {},
    )  # fmt: skip
    local = {"lr": setup.local.lr, "lr_end": setup.local.lr}
    config = from_dict({"seed": seed, "rounds": rounds, "eval": {"every": 0}, "local": local})
    with Run(folder, config, listen=listen) as run:
        run.begin()
        requested = LocalClients(clients, schedule or Delayed(order, seed=seed), runtime)
        progress = federate(Federation(method, requested, server, runtime), run)
    return Outcome(dict(settings), setup, method, server, clients, runtime, progress.state, folder)
