"""Policy: what the owner of a machine lets any server ask of it, in one file. No order and no configuration changes it.

What can be seen in a configuration is refused before anything is loaded, what the data decide (`check_built`) before
anything is trained, and what a method does (`Guard`) when it asks for it. A server that ships other code than llm_fed's
is outside of it: a Flower app is code that runs at the node.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from llm_fed.basics.errors import UserError
from llm_fed.bench.build import Experiment
from llm_fed.federation.privacy import at_clients, composed
from llm_fed.method import requests as kinds
from llm_fed.method.requests import Executor, Fit, FitHead, Request
from llm_fed.network.ledger import Ledger, Releases
from llm_fed.network.refusals import Refused
from llm_fed.settings import Above, Below, NonNegativeFloat, PositiveFloat, PositiveInt, configfile
from llm_fed.settings.config import AdapterConfig, Config

Kind = Literal["training", "answers", "losses"]
_KINDS: tuple[Kind, ...] = ("training", "answers", "losses")
_ANSWERS = (kinds.Generate, kinds.OptionScores, kinds.AnswerLoss, kinds.Logits, kinds.Answers)
_LEAST = 4096  # bytes that a file or folder takes on a disk, however little it holds


@dataclass(frozen=True)
class Policy:
    """The fields of the file; what is None is not limited."""

    configurations: tuple[str, ...] | None = None  # SHA-256 of each config.yaml that was agreed on
    methods: tuple[str, ...] | None = None
    bases: tuple[str, ...] | None = None
    requests: tuple[Kind, ...] | None = None  # None: all, but with `noise` or `epsilon` training alone
    layers: tuple[str, ...] | None = None  # parts of the names of trained parameters, one of which each must have
    columns: tuple[str, ...] | None = None
    noise: NonNegativeFloat = 0.0  # the least noise multiplier, added here
    clip: PositiveFloat | None = None  # the largest clipping norm
    secure: bool = False  # answers only where nobody sees through their sum (`privacy.secure`)
    epsilon: PositiveFloat | None = None  # that all answers of a client together may spend
    delta: Annotated[float, Above(0), Below(1)] = 1e-5
    batch_size: PositiveInt = 1  # the smallest, and the fewest examples that a fit may rest on
    steps: PositiveInt = 10_000  # of one fit
    rank: PositiveInt = 256
    length: PositiveInt = 32_768  # tokens of an example, or pixels of a side
    new_tokens: PositiveInt = 4096
    disk: PositiveFloat = 50.0  # GB below `home`
    hours: PositiveFloat = 6.0  # for one message; a worker that takes longer is ended

    @property
    def allowed(self) -> Collection[Kind]:
        """The kinds of requests that are carried out. A server chooses which rows are tested; scores have no noise."""
        return (_KINDS[:1] if self.epsilon or self.noise else _KINDS) if self.requests is None else self.requests

    def check_text(self, config: str) -> None:
        """Refuse a configuration that was not agreed on, before it is even read."""
        self._among("configurations", (digest(config),), self.configurations)

    def check(self, config: Config) -> None:
        """Raises `Refused` for the first thing that a configuration asks for beyond this policy."""
        private, columns = config.privacy, config.task.columns
        texts = [name for name in (*asdict(columns).values(), config.task.partition.label) if isinstance(name, str)]
        self._require("secure", private.secure or not self.secure, "single updates")
        self._among("methods", (str(config.method["name"]),), self.methods)
        self._among("bases", (config.base.name, *(config.base.clients or ())), self.bases)
        self._among("columns", (*texts, *columns.extra), self.columns)
        if self.noise or self.clip or self.epsilon:
            self._require("noise", at_clients(private) and private.noise >= self.noise, private)
        if self.clip is not None:
            self._require("clip", private.clip is not None and private.clip <= self.clip, private.clip)
        self._require("batch_size", config.local.batch_size >= self.batch_size, config.local.batch_size)
        requested = {"steps": config.local.steps or config.local.epochs or 0, "rank": _largest_rank(config.adapter)}
        requested["length"] = max(config.task.max_length, config.task.image_size or 0)
        for key, value in (requested | {"new_tokens": config.eval.max_new_tokens}).items():
            self._require(key, value <= getattr(self, key), value)

    def check_built(self, built: Experiment) -> None:
        """As `check`, what only the data and the model tell."""
        self._among("columns", built.reading.used if built.reading else (), self.columns)
        for site in built.trainers.values():
            size, steps = site.planned
            self._require("steps", steps <= self.steps, steps)
            self._require("batch_size", size >= self.batch_size, size)
            site.most_steps = self.steps
            for name in site.initial().layout.names if self.layers is not None else ():
                self._require("layers", not {*name.split(".")}.isdisjoint(self.layers or ()), name)

    def check_room(self, home: Path) -> None:
        """Refuse to write anything more below a folder that is full."""
        held = _held(home)
        self._require("disk", held < self.disk * 1e9, f"{held / 1e9:.3g} GB in {home}; remove runs that have ended")

    def check_spent(self, ledger: Ledger, more: Releases) -> None:
        """Refuse an answer that releases `more` than a client may."""
        if self.epsilon is not None:
            spent = composed(ledger.released(more=more), self.delta)
            self._require("epsilon", spent <= self.epsilon, f"an answer with which {spent:.3g} would be spent")

    def _among(self, key: str, values: Iterable[str], known: Collection[str] | None) -> None:
        for value in values:
            self._require(key, known is None or value in known, value)

    def _require(self, key: str, good: bool, value: object) -> None:
        if not good:
            raise Refused(f"policy.{key}", f"the server asks for {value}, and the policy has {key}={asdict(self)[key]}")


class Guard:
    """An engine that carries out what the owner allows."""

    def __init__(self, engine: Executor, policy: Policy):
        self._engine, self._policy = engine, policy
        self.take_work = engine.take_work

    def execute(self, requests: Sequence[Request[Any]]) -> Sequence[Any]:
        for request in requests:
            kind: Kind = "answers" if isinstance(request, _ANSWERS) else "losses"
            if isinstance(request, Fit | FitHead):
                kind, used = "training", {location for step in request.batches for location in step}
                if len(used) < self._policy.batch_size and not (isinstance(request, Fit) and request.private):
                    said = f"a fit of {request.site} rests on {len(used)} examples alone"
                    raise Refused("policy.batch_size", said)
            if kind not in self._policy.allowed:
                raise Refused("policy.requests", f"{request.site} is asked for {kind} ({type(request).__name__})")
        return self._engine.execute(requests)


def _largest_rank(adapter: AdapterConfig | None) -> int:
    rank = adapter.rank if adapter else 0
    if isinstance(rank, int):
        return rank
    return max(rank.values() if isinstance(rank, dict) else rank, default=0)


def read(path: str | None) -> Policy:
    """The policy in a file; without one that of the defaults. Refused: it cannot be read, so nothing is served."""
    try:
        return configfile.section(Policy, configfile.read(path)) if path else Policy()
    except UserError as error:
        raise Refused("setup", f"--node-config policy: {error}") from error


def digest(config: str) -> str:
    """By which an owner's policy names the configuration of an app: what `sha256sum` says of its config.yaml."""
    return hashlib.sha256(config.encode()).hexdigest()


def _held(folder: Path) -> int:
    """Bytes of a folder on its disk, about."""
    names = (os.path.join(location, name) for location, inner, files in os.walk(folder) for name in (*inner, *files))
    return sum(max(_LEAST, os.lstat(name).st_size) for name in names)
