"""Answers of the right form with numbers that no honest client gives, through each method's own server step.

In small federations of every method, of adapters and of whole ResNets, one client answers falsely for three rounds:
each part of its real answer (a row of weights, running statistics, counts, a chosen model) becomes each of some twenty
values. A finding is a server's step that fails, a state that is not finite or cannot be sent, and, where the part is no
row of weights, honest clients that lose more than where these answers are refused or real.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import battery
import pytest
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

CLIENTS, ROUNDS, BOUND = 6, 3, 10.0
SIZES = {f"c{k}": 4 + k % 3 for k in range(CLIENTS)}
SPOILT = "c1"
SLACK = 0.25  # of the honest clients' loss: how much it may be above that under refusal, or beside an honest answer
ROW, STATISTICS, COUNTERS = "row", "statistics", "counters"

Lie = Callable[[Tensor, Tensor, Tensor], Tensor]  # (real, of another client, of an earlier round) -> false


def _all(value: float) -> Lie:
    return lambda real, other, before: torch.full_like(real, value)


def _one(value: float) -> Lie:
    def lie(real: Tensor, other: Tensor, before: Tensor) -> Tensor:
        false = real.clone()
        false.view(-1)[:1] = value
        return false

    return lie


_ANY: dict[str, Lie] = {
    "backwards": lambda real, other, before: real.flatten().flip(0).view_as(real),
    "of another client": lambda real, other, before: other.clone(),
    "of an earlier round": lambda real, other, before: before.clone(),
}
FLOATS: dict[str, Lie] = {
    **{f"times {factor:g}": (lambda real, *_, f=factor: f * real) for factor in (-1, 3, 9, -9, 1e2, 1e6, 1e-6)},
    **{f"all {value:g}": _all(value) for value in (0, 1, -1e3, 1e-42, 3e38, -3e38, 1e300, math.nan, math.inf)},
    **{f"one {value:g}": _one(value) for value in (1e30, -1e3, math.nan, -math.inf)},
} | _ANY  # fmt: skip
INTEGERS: dict[str, Lie] = {
    **{f"all {value}": _all(value) for value in (0, 1, -1, 10**9, -(10**6), 2**62, 2**63 - 1, -(2**63))},
    **{f"one {value}": _one(value) for value in (-1, 10**9, 2**62)},
    "twice": lambda real, other, before: 2 * real,
    "one more": lambda real, other, before: real + 1,
} | _ANY
FLAGS: dict[str, Lie] = {"all": _all(1), "none": _all(0), "the others": lambda real, other, before: ~real} | _ANY
NUMBERS = (0, 1, 2, 3, 7, -1, -2, 10**6, 2**31, 2**53, 2**62, 2**63 - 1, -(2**63), 2**64 - 1)


def lies_of(tensor: Tensor) -> dict[str, Lie]:
    return FLOATS if tensor.is_floating_point() else FLAGS if tensor.dtype == torch.bool else INTEGERS


@dataclass(frozen=True)
class Case:
    """One false answer: which part, what becomes of it, and a statistic that is nine times as large, too."""

    path: str
    part: str  # of a state: ROW, STATISTICS or COUNTERS; of anything else nothing
    how: str
    also: str = ""


class Attacked:
    """A method's federation, and its state before the rounds."""

    def __init__(self, name: str, folder: Path):
        settings, setup = battery.settings_of(name), battery.setup_of(name)
        if setup.labels:
            setup = replace(setup, examples=_pictures)
        self.whole = federation.go(settings, setup, folder, rounds=1, order=tuple(SIZES), sizes=SIZES, per_pass=CLIENTS)
        self.state, self.memory = self.whole.state, copy(self.whole.server.memory)

    def cases(self) -> Iterator[Case]:
        """Each part alone, and what counts a statistic together with a false one, which it is to give weight."""
        with self.whole.undone():
            content = next(upload.content for upload in self.answers(1) if upload.client == SPOILT)
        parts = list(leaves(content))
        for path, value in parts:
            if isinstance(value, State):
                kinds = {STATISTICS if extra.is_floating_point() else COUNTERS for extra in value.extras.values()}
                for part in (ROW, *sorted(kinds)):
                    yield from (Case(path, part, how) for how in (INTEGERS if part == COUNTERS else FLOATS))
            elif isinstance(value, Tensor):
                counted = [one for one, it in parts if isinstance(it, Tensor) and it.is_floating_point()]
                beside = [] if value.is_floating_point() else counted
                yield from (Case(path, "", how, also) for how in lies_of(value) for also in ("", *beside))
            elif type(value) is int:
                yield from (Case(path, "", str(number)) for number in NUMBERS)

    def answers(self, number: int) -> list[Upload]:
        """What all clients answer to the present state."""
        whole, messages = self.whole, self.whole.messages()
        for site in whole.clients.values():
            site.begin(number + 1, whole.setup.local.lr)
        contents = run(whole, {k: whole.method.client_update(s, messages[k]) for k, s in whole.clients.items()})
        return [Upload(k, whole.clients[k].num_examples, 0, unpack(pack(v))) for k, v in contents.items()]

    def after(self, lie: Case | None, refuse: bool = False) -> tuple[float, str]:
        """The loss of honest clients after rounds in which one answers so (None: as it should), and why that was
        refused. `refuse`: whether its answers count as none."""
        whole, why, before = self.whole, "", []
        whole.state, whole.server.memory = self.state, copy(self.memory)
        with whole.undone():
            for number in range(1, ROUNDS + 1):
                real = self.answers(number)
                contents = {upload.client: upload.content for upload in real}
                sent = [replace(upload, content=self.told(lie, upload, contents, before)) for upload in real]
                before = [contents[SPOILT]]
                likes = {name: whole.method.upload_like(message) for name, message in whole.messages().items()}
                given = [Given.of(likes[each.client], each.num_examples) for each in sent]
                found = flaws([each.content for each in sent], given, BOUND, whole.method.sends)
                flawed = {each.client: flaw for each, flaw in zip(sent, found, strict=True) if flaw}
                assert not flawed.keys() - {SPOILT}, f"an honest client was refused: {flawed}"
                why = flawed.get(SPOILT, why)
                taken = [each for each in sent if each.client not in flawed and not (refuse and each.client == SPOILT)]
                whole.server.begin(number + 1, whole.setup.local.lr)
                step = whole.method.server_update(whole.server, whole.state, taken)
                whole.state = run(whole, {"server": step})["server"]
                if where := infinite(whole.state, "state"):
                    raise AssertionError(f"{where} is not finite")
                whole.state = unpack(pack(whole.state))
            return self.loss(), why

    def told(self, lie: Case | None, upload: Upload, contents: dict[str, Any], before: list[Any]) -> Any:
        """The answer that a client gives in the place of its own."""
        real = upload.content
        if lie is None or upload.client != SPOILT:
            return real
        sent = [real, contents["c2"], before[0] if before else real]
        false = _replaced(real, lie.path, _value(lie, *(at(one, lie.path) for one in sent)))
        false = _replaced(false, lie.also, 9 * at(real, lie.also)) if lie.also else false
        return unpack(pack(false))

    def loss(self) -> float:
        """The mean loss of the honest clients: of their models as they are scored, and in their next training."""
        whole, messages = self.whole, self.whole.messages()
        honest = {name: site for name, site in whole.clients.items() if name != SPOILT}
        for site in honest.values():
            site.begin(ROUNDS + 2, whole.setup.local.lr)
        models = run(whole, {name: whole.method.personalize(site, messages[name]) for name, site in honest.items()})
        scored = run(whole, {name: site.losses_of([models[name]]) for name, site in honest.items()})
        run(whole, {name: whole.method.client_update(site, messages[name]) for name, site in honest.items()})
        trained = [loss for site in honest.values() for loss in site.losses]
        pack(whole.method.report(whole.state))
        return fmean(loss for (loss,) in scored.values()) + (fmean(trained) if trained else 0.0)


def run(whole: federation.Outcome, work: dict[str, Any]) -> dict[str, Any]:
    """What coroutines of sites return; the first exception is raised."""
    outcomes = whole.runtime.run(work)
    for outcome in outcomes.values():
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


def _pictures(client: int, size: int) -> list[Picture]:
    """Of two of four classes; the next client has one of them, too."""
    classes = (client % tiny.CLASSES, (client + 1) % tiny.CLASSES)
    return [picture for picture in tiny.pictures(6 * size + 6, seed=client) if picture.label in classes][:size]


def _value(lie: Case, real: Any, other: Any, before: Any) -> Any:
    """What becomes of a part; a state of another round or client with other entries is sent as it was."""
    if isinstance(real, State):
        source = {"of another client": other, "of an earlier round": before}.get(lie.how, real)
        if not isinstance(source, State) or source.layout != real.layout:
            return source
        if lie.part == ROW:
            return State(real.layout, FLOATS[lie.how](real.row, other.row, before.row), real.extras)
        extras = dict(real.extras)
        for name, value in extras.items():
            if value.is_floating_point() == (lie.part == STATISTICS):
                extras[name] = lies_of(value)[lie.how](value, other.extras[name], before.extras[name])
        return State(real.layout, real.row, extras)
    return lies_of(real)[lie.how](real, other, before) if isinstance(real, Tensor) else int(lie.how)


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
    attacked, outcomes, findings = Attacked(name, folder), Counter[str](), []
    worst = max(attacked.after(None)[0], attacked.after(None, refuse=True)[0])
    for case in chosen([*attacked.cases()]):
        try:
            loss, why = attacked.after(case)
        except Exception as error:  # of any kind: none should be
            findings.append(f"{name}: {case}: {type(error).__name__}: {str(error)[:200]}")
            continue
        outcomes["refused" if why else "taken"] += 1
        if not math.isfinite(loss) or (case.part != ROW and loss > worst * (1 + SLACK)):
            findings.append(f"{name}: {case}: loss {loss:.4f}, at most {worst:.4f} otherwise ({why or 'taken'})")
    return outcomes, findings


@pytest.mark.parametrize("name", ["ifca", "fedex-lora"])
def test_no_answer_of_one_client_harms_the_others(name, tmp_path):
    draw = random.Random(0)
    outcomes, findings = attack(name, tmp_path, lambda cases: draw.sample(cases, 2))
    assert not findings and outcomes["refused"] and outcomes.total() == 2


def test_an_answer_with_the_entries_of_another_round_is_refused_by_name(tmp_path):
    """RoLoRA's clients send A and B in turn, so an answer that is sent again has entries that nobody asked for."""
    attacked = Attacked("rolora", tmp_path)
    (case,) = (case for case in attacked.cases() if case.part == "row" and case.how == "of an earlier round")
    assert attacked.after(case)[1].startswith("upload.entries has no model.layers.0.self_attn.q_proj.lora_")


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_no_answer_of_one_client_harms_the_others_in_any_method(name, tmp_path):
    draw = random.Random(name)
    some = lambda cases: draw.sample(cases, min(20, len(cases)))  # noqa: E731
    outcomes, findings = attack(name, tmp_path, some)
    assert not findings and outcomes["refused"]
