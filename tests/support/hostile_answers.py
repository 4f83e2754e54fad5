"""Answers of the right form with numbers that no honest client gives, through each method's own `server_update`.

In small federations of every method, of adapters and of whole ResNets, one client answers falsely for three rounds:
each part of its real answer (a row of weights, running statistics, counts, a chosen model) becomes each of some twenty
values. A finding is a server's step that fails, a state that is not finite or cannot be sent, and, where the part is no
row of weights, honest clients that lose more than where these answers are refused or real.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import battery
import torch
from torch import Tensor

from llm_fed.federation.uploads import flaws
from llm_fed.method import Upload
from llm_fed.state import State
from llm_fed.state.outline import at, infinite, leaves
from llm_fed.state.roles import Given
from llm_fed.state.wire import pack, unpack
from llm_fed.tasks.common import Picture
from llm_fed.testing import federation, tiny
from llm_fed.testing.federation import Outcome

CLIENTS, ROUNDS, BOUND = 6, 3, 10.0
SIZES = {f"c{k}": 4 + k % 3 for k in range(CLIENTS)}
SPOILT = "c1"
SLACK = 0.25  # of the honest clients' loss: how much it may be above that under refusal, or beside an honest answer
ROW, STATISTICS, COUNTERS = "row", "statistics", "counters"

Change = Callable[[Tensor, Tensor, Tensor], Tensor]  # (real, of another client, of an earlier round) -> false


def _all(value: float) -> Change:
    return lambda real, other, before: torch.full_like(real, value)


def _one(value: float) -> Change:
    return lambda real, other, before: torch.cat(
        [torch.full_like(real.flatten()[:1], value), real.flatten()[1:]]
    ).view_as(real)


_ANY: dict[str, Change] = {
    "backwards": lambda real, other, before: real.flatten().flip(0).view_as(real),
    "of another client": lambda real, other, before: other.clone(),
    "of an earlier round": lambda real, other, before: before.clone(),
}
FLOATS: dict[str, Change] = {
    "negative": lambda real, other, before: -real,
    **{f"times {factor:g}": (lambda real, other, before, f=factor: f * real) for factor in (3, 9, -9, 1e2, 1e6, 1e-6)},
    **{f"all {value:g}": _all(value) for value in (0, 1, -1e3, 1e-42, 3e38, -3e38, 1e300, math.nan, math.inf)},
    **{f"one {value:g}": _one(value) for value in (1e30, -1e3, math.nan, -math.inf)},
    "repeated": lambda real, other, before: real.flatten()[:1].expand(real.numel()).reshape(real.shape),
} | _ANY  # fmt: skip
INTEGERS: dict[str, Change] = {
    **{f"all {value}": _all(value) for value in (0, 1, -1, 10**9, -(10**6), 2**62, 2**63 - 1, -(2**63))},
    **{f"one {value}": _one(value) for value in (-1, 10**9, 2**62)},
    "negative": FLOATS["negative"],
    "twice": lambda real, other, before: 2 * real,
    "one more": lambda real, other, before: real + 1,
} | _ANY
FLAGS: dict[str, Change] = {"all": _all(1), "none": _all(0), "the others": lambda real, other, before: ~real} | _ANY
NUMBERS = (0, 1, 2, 3, 7, -1, -2, 10**6, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)


def changes_of(tensor: Tensor) -> dict[str, Change]:
    return FLOATS if tensor.is_floating_point() else FLAGS if tensor.dtype == torch.bool else INTEGERS


@dataclass(frozen=True)
class Case:
    """One false answer: which part, and what becomes of it."""

    path: str
    part: str  # of a state: ROW, STATISTICS, COUNTERS, or the name of one buffer; of anything else nothing
    how: str
    also: tuple[str, str] = ("", "")  # a statistic that is false, too, and how

    @property
    def of_weights(self) -> bool:
        return self.part == ROW


@dataclass
class Round:
    """The real answers of one round, and what is known of them in advance."""

    uploads: dict[str, Upload]
    given: dict[str, Given]


@dataclass
class Attacked:
    """A method's federation, its state before the rounds, and the real answers of these."""

    name: str
    whole: Outcome
    rounds: list[Round] = field(default_factory=list)

    @classmethod
    def of(cls, name: str, folder: Path) -> Attacked:
        settings, setup = battery.settings_of(name), battery.setup_of(name)
        if setup.labels:
            setup = replace(setup, examples=_pictures)
        whole = federation.go(settings, setup, folder, rounds=1, order=tuple(SIZES), sizes=SIZES, per_pass=CLIENTS)
        found, honest, memory = cls(name, whole), whole.state, copy(whole.server.memory)
        for number in range(ROUNDS):
            whole.state = honest if not number else found.step(whole.state, found.rounds[-1], {}, number)[0]
            found.rounds.append(found._ask(number + 1))
        whole.state, whole.server.memory = honest, memory
        return found

    def _ask(self, number: int) -> Round:
        whole = self.whole
        messages = whole.messages()
        for site in whole.clients.values():
            site.begin(number + 1, whole.setup.local.lr)
        answers = whole.runtime.run({k: whole.method.client_update(s, messages[k]) for k, s in whole.clients.items()})
        uploads = {k: Upload(k, whole.clients[k].num_examples, 0, unpack(pack(v))) for k, v in answers.items()}
        likes = {name: whole.method.upload_like(unpack(pack(message))) for name, message in whole.messages().items()}
        given = {name: Given.of(like, whole.clients[name].num_examples) for name, like in likes.items()}
        return Round(uploads, given)

    def cases(self) -> Iterator[Case]:
        """Each part alone, and what counts a statistic together with a false one, which it is to give weight."""
        parts = list(leaves(self.rounds[0].uploads[SPOILT].content))
        statistics = [path for path, value in parts if isinstance(value, Tensor) and value.is_floating_point()]
        for path, value in parts:
            if isinstance(value, State):
                yield from (Case(path, ROW, how) for how in FLOATS)
                floats = [name for name, extra in value.extras.items() if extra.is_floating_point()]
                if floats:
                    parts = [STATISTICS, floats[0], floats[1], floats[-1]]
                    yield from (Case(path, part, how) for part in parts for how in FLOATS)
                if len(floats) < len(value.extras):
                    yield from (Case(path, COUNTERS, how) for how in INTEGERS)
            elif isinstance(value, Tensor):
                yield from (Case(path, "", how) for how in changes_of(value))
                if not value.is_floating_point():
                    lies = [(statistic, lie) for statistic in statistics for lie in ("negative", "times -9", "times 9")]
                    yield from (Case(path, "", how, lie) for how in changes_of(value) for lie in lies)
            elif type(value) is int:
                yield from (Case(path, "", str(number)) for number in NUMBERS)

    def spoilt(self, case: Case, here: Round, earlier: Round) -> Any:
        """The false answer of one round."""
        sent = real, *_ = [here.uploads[SPOILT].content, here.uploads["c2"].content, earlier.uploads[SPOILT].content]
        found = _replaced(real, case.path, _value(case, *(at(one, case.path) for one in sent)))
        where, how = case.also
        return _replaced(found, where, FLOATS[how](*(at(one, where) for one in sent))) if how else found

    def step(self, state: Any, round: Round, false: dict[str, Any], number: int) -> tuple[Any, dict[str, str]]:
        """The server's state after a round, and who was refused."""
        whole, names = self.whole, list(round.uploads)
        contents = [false.get(name, round.uploads[name].content) for name in names]
        contents = [unpack(pack(content)) for content in contents if content is not None]
        names = [name for name in names if false.get(name, 0) is not None]
        found = flaws(contents, [round.given[name] for name in names], BOUND, whole.method.sends)
        refused = {name: flaw for name, flaw in zip(names, found, strict=True) if flaw}
        answers = {name: content for name, content in zip(names, contents, strict=True) if name not in refused}
        uploads = [replace(round.uploads[name], content=content) for name, content in answers.items()]
        whole.server.begin(number + 2, whole.setup.local.lr)
        (outcome,) = whole.runtime.run({"server": whole.method.server_update(whole.server, state, uploads)}).values()
        if isinstance(outcome, Exception):
            raise outcome
        if where := infinite(outcome, "state"):
            raise AssertionError(f"{where} is not finite")
        return unpack(pack(outcome)), refused

    def after(self, case: Case | None, honest: bool = False, anew: bool = False) -> tuple[Any, dict[str, str]]:
        """The state after all rounds in which one answers so (None: is refused, or honest), and why it was refused.

        Args:
            anew: all clients train on what they are sent in these rounds. By default they answer as in honest ones, as
                training takes most of the time.
        """
        state, memory, refused = self.whole.state, copy(self.whole.server.memory), {}
        last = self.rounds[-1]
        try:
            for number, round in enumerate(self.rounds):
                if anew:
                    round = self._of_state(state, number + 1)
                false = {} if honest else {SPOILT: None if case is None else self.spoilt(case, round, last)}
                last = round
                state, flawed = self.step(state, round, false, number)
                assert not flawed.keys() - {SPOILT}, f"an honest client was refused: {flawed}"
                refused |= flawed
            return state, refused
        finally:
            self.whole.server.memory = memory

    def _of_state(self, state: Any, number: int) -> Round:
        before, self.whole.state = self.whole.state, state
        try:
            with self.whole.undone():
                return self._ask(number)
        finally:
            self.whole.state = before

    def finding(self, case: Case, worst: float, anew: bool = False) -> tuple[str, bool]:
        """What is wrong with the state after such answers, in words that are empty where nothing is; whether the server
        has refused them."""
        try:
            state, refused = self.after(case, anew=anew)
            if len(refused) == 1 and case.of_weights:
                return "", True
            loss = self.loss(state)
        except Exception as error:  # of any kind: none should be
            return f"{type(error).__name__}: {str(error)[:200]}", False
        if not math.isfinite(loss):
            return f"the honest clients' loss is {loss}", bool(refused)
        if not case.of_weights and loss > worst * (1 + SLACK):
            why = f" ({refused[SPOILT]})" if refused else ""
            return f"loss {loss:.4f}, at most {worst:.4f} otherwise{why}", bool(refused)
        return "", bool(refused)

    def loss(self, state: Any) -> float:
        """The mean loss of the honest clients: of their models as they are scored, and in their next training."""
        whole, before = self.whole, self.whole.state
        honest = {name: site for name, site in whole.clients.items() if name != SPOILT}
        whole.state = state
        try:
            with whole.undone():
                messages = whole.messages()
                for site in honest.values():
                    site.begin(ROUNDS + 2, whole.setup.local.lr)
                pick = {name: whole.method.personalize(site, messages[name]) for name, site in honest.items()}
                models = whole.runtime.run(pick)
                scored = whole.runtime.run({name: site.losses_of([models[name]]) for name, site in honest.items()})
                work = {name: whole.method.client_update(site, messages[name]) for name, site in honest.items()}
                trained = whole.runtime.run(work)
                for outcome in (*models.values(), *scored.values(), *trained.values()):
                    if isinstance(outcome, Exception):
                        raise outcome
                trainings = [loss for site in honest.values() for loss in site.losses]
                pack(whole.method.report(state))
                return fmean(loss for (loss,) in scored.values()) + (fmean(trainings) if trainings else 0.0)
        finally:
            whole.state = before


def _pictures(client: int, size: int) -> list[Picture]:
    """Of two of four classes; the next client has one of them, too."""
    classes = (client % tiny.CLASSES, (client + 1) % tiny.CLASSES)
    return [picture for picture in tiny.pictures(6 * size + 6, seed=client) if picture.label in classes][:size]


def _value(case: Case, real: Any, other: Any, before: Any) -> Any:
    """What becomes of a part; a state of another round or client with other entries is sent as it was."""
    if isinstance(real, State):
        source = {"of another client": other, "of an earlier round": before}.get(case.how, real)
        if not isinstance(source, State) or source.layout != real.layout:
            return source
        if case.part == ROW:
            return State(real.layout, FLOATS[case.how](real.row, other.row, before.row), real.extras)
        extras = dict(real.extras)
        for name, value in extras.items():
            group = STATISTICS if value.is_floating_point() else COUNTERS
            if case.part in (group, name):
                extras[name] = changes_of(value)[case.how](value, other.extras[name], before.extras[name])
        return State(real.layout, real.row, extras)
    return changes_of(real)[case.how](real, other, before) if isinstance(real, Tensor) else int(case.how)


def _replaced(message: Any, path: str, value: Any) -> Any:
    if not path:
        return value
    key, _, rest = path.partition(".")
    return {**message, key: _replaced(message[key], rest, value)}


def names() -> list[str]:
    """The methods of the battery whose clients send something, of adapters and of whole models."""
    return [name for name in (*battery.FEDERATED, *battery.WHOLE_MODELS) if name.split()[0] not in ("local", "fed+ft")]


def attack(name: str, folder: Path, chosen: Callable[[list[Case]], list[Case]]) -> tuple[Counter[str], list[str]]:
    """What became of the chosen cases of a method, and the findings."""
    attacked, outcomes, findings = Attacked.of(name, folder), Counter[str](), []
    worst = max(attacked.loss(attacked.after(None, honest=honest)[0]) for honest in (False, True))
    for case in chosen([*attacked.cases()]):
        wrong, refused = attacked.finding(case, worst)
        outcomes["refused" if refused else "taken"] += 1
        if wrong:  # or the honest answers do not fit what false ones have made of the state
            wrong, _ = attacked.finding(case, worst, anew=True)
        if wrong:
            findings.append(f"{name}: {case}: {wrong}")
    return outcomes, findings
