"""Faults for `llm-fed audit`: in the round loop while a tiny run goes on, or in the files of one that is finished."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from audit_runs import train
from safetensors.torch import load_file, save_file

from llm_fed.audit.findings import Audit
from llm_fed.federation import loop
from llm_fed.federation.clients import LocalClients, Messages
from llm_fed.runs.checkpoint import Checkpoints, rounds_in
from llm_fed.settings.config import Config
from llm_fed.state import State
from llm_fed.state.wire import pack, unpack

KINDS = ("no broadcast", "stale message", "swapped clients", "changed weight", "edited metric", "skipped validation")


@dataclass(frozen=True)
class Fault:
    """What was injected, and where the audit should find it; any of the kinds that may be named.

    Attributes:
        client: empty: any.
        round: 0: any.
    """

    round: int
    client: str
    kinds: tuple[str, ...]

    def named(self, report: Audit) -> bool:
        return any(
            item.kind in self.kinds and self.round in (0, item.round) and self.client in ("", item.client)
            for item in report.findings
        )


def inject(kind: str, family: str, config: Config, clean: Path, folder: Path, draw: random.Random) -> Fault | None:
    """A run with a fault in `folder`; None where the draw changed nothing."""
    place = draw.choice(("loop", "loop", "checkpoint", "adapter")) if kind == "changed weight" else "loop"
    if kind == "edited metric" or place != "loop":
        shutil.copytree(clean, folder)
        return _edit_metric(folder, draw) if kind == "edited metric" else _edit_file(folder, place, draw)
    faults: dict[str, Callable[..., Any]] = {
        "no broadcast": _wrong_message, "stale message": _wrong_message, "swapped clients": _swapped,
        "changed weight": _changed_state, "skipped validation": _skipped,
    }  # fmt: skip
    made: list[Fault] = []
    with faults[kind](kind, draw.randint(2, config.rounds), made, draw):
        train(family, config, folder)
    same = all(path.read_bytes() == (folder / path.relative_to(clean)).read_bytes() for path in clean.rglob("*s.jsonl"))
    return made[0] if made and not same else None  # clients that ignore what they are sent: metrics and digests agree


@contextmanager
def _wrong_message(kind: str, round: int, made: list[Fault], draw: random.Random) -> Iterator[None]:
    """A client trains on an earlier message: on that of the first round, from `round` on, or once on the last one."""
    real_exchange, real_ask, states, chosen = LocalClients.exchange, LocalClients._ask, {}, []  # type: ignore[var-annotated]

    def exchange(self: Any, method: Any, progress: Any, lr: float, run: Any, watch: Any) -> Any:
        states[progress.round] = unpack(pack(progress.state))
        return real_exchange(self, method, progress, lr, run, watch)

    def ask(self: Any, method: Any, messages: dict[str, bytes], now: int, lr: float, then: Any = None) -> Any:
        if now == round or (now > round and kind == "no broadcast"):
            client = chosen[0] if chosen else draw.choice(sorted(messages)) if messages else ""
            old = states.get(1 if kind == "no broadcast" else round - 1)
            if client in messages:
                chosen[:] = [client]
                earlier = Messages(method, old, [client]).packed(client)
                if earlier != messages[client]:
                    made.append(Fault(now, client, ("client pass",)))
                messages = {**messages, client: earlier}
        return real_ask(self, method, messages, now, lr, then)

    with mock.patch.object(LocalClients, "exchange", exchange), mock.patch.object(LocalClients, "_ask", ask):
        yield


@contextmanager
def _swapped(kind: str, round: int, made: list[Fault], draw: random.Random) -> Iterator[None]:
    """Two clients train on what the other is sent, or each one's answer is taken for the other's."""
    real, what = LocalClients._ask, draw.choice(("messages", "answers"))

    def ask(self: Any, method: Any, messages: dict[str, bytes], now: int, lr: float, then: Any = None) -> Any:
        if now != round or len(messages) < 2:
            return real(self, method, messages, now, lr, then)
        one, other = draw.sample(sorted(messages), 2)
        if what == "messages" and messages[one] != messages[other]:
            made.append(Fault(now, one, ("client pass",)))
            messages = {**messages, one: messages[other], other: messages[one]}
            return real(self, method, messages, now, lr, then)
        answers = real(self, method, messages, now, lr, then)
        if pack(answers[one]) != pack(answers[other]):
            made.append(Fault(now, one, ("client pass",)))
        return {**answers, one: answers[other], other: answers[one]}

    with mock.patch.object(LocalClients, "_ask", ask):
        yield


@contextmanager
def _changed_state(kind: str, round: int, made: list[Fault], draw: random.Random) -> Iterator[None]:
    """One weight of the server's state is changed, before the round's digests are taken or after them."""
    real_check, real_exchange, when = loop._check_finite, LocalClients.exchange, draw.choice(("before", "after"))

    def change(state: Any, kinds: tuple[str, ...]) -> None:
        if (first := _first(state)) is not None:
            place = draw.randrange(first.row.numel())
            first.row[place] += 1e-3
            made.append(Fault(round, "", kinds))

    def check(state: Any, run: Any, now: int) -> None:
        if now == round and when == "before":
            change(state, ("server step",))
        real_check(state, run, now)

    def exchange(self: Any, method: Any, progress: Any, lr: float, run: Any, watch: Any) -> Any:
        if progress.round == round and when == "after":
            change(progress.state, ("message", "server step", "client pass"))
        return real_exchange(self, method, progress, lr, run, watch)

    with mock.patch.object(loop, "_check_finite", check), mock.patch.object(LocalClients, "exchange", exchange):
        yield


def _first(node: Any) -> State | None:
    """The first state in a message."""
    if isinstance(node, State):
        return node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list | tuple) else ()
    return next((first for child in children if (first := _first(child)) is not None), None)


@contextmanager
def _skipped(kind: str, round: int, made: list[Fault], draw: random.Random) -> Iterator[None]:
    """A round's validation is left out, or its line says again what the last one said."""
    real, how, last = loop._score, draw.choice(("left out", "said again")), []  # type: ignore[var-annotated]

    def score(method: Any, run: Any, progress: Any, scoring: Any) -> bool:
        if progress.round != round:
            outcome = real(method, run, progress, scoring)
            last[:] = [line for line in run.records() if line["kind"] == "score"][-1:]
            return outcome
        if how == "said again" and last:
            made.append(Fault(round, "", ("scores",)))
            line = {**last[0], "round": round}
            run.log(line)
            return progress.consider(line, run.config)
        made.append(Fault(round, "", ("scores",)))
        return False

    with mock.patch.object(loop, "_score", score):
        yield


def _edit_metric(folder: Path, draw: random.Random) -> Fault:
    """One number of one line of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    able = [(n, key) for n, line in enumerate(lines) for key in line if isinstance(line[key], float)]
    place, key = draw.choice(able)
    lines[place][key] = round(lines[place][key] + draw.choice((0.001, 0.5, -1.0)), 6)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return Fault(0, "", ("chain", "scores"))


def _edit_file(folder: Path, place: str, draw: random.Random) -> Fault | None:
    """One weight of an exported adapter; or of a checkpoint, with a checksum to match or without."""
    if place == "adapter":
        path = draw.choice(sorted(folder.glob("adapters/*/*.safetensors")))
        tensors = load_file(path)
        weights = tensors[draw.choice(sorted(name for name in tensors if tensors[name].is_floating_point()))]
        weights.view(-1)[draw.randrange(weights.numel())] += 1e-3
        save_file(tensors, path, metadata={"format": "pt"})
        return Fault(0, path.parent.name, ("export",))
    round = draw.choice(rounds_in(folder / "checkpoints"))
    path = folder / "checkpoints" / f"round-{round:04d}" / "state.safetensors"
    if draw.random() < 0.5:
        data = bytearray(path.read_bytes())
        data[-1 - draw.randrange(8)] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        return Fault(round, "", ("checkpoint",))
    checkpoints = Checkpoints(folder / "checkpoints")
    saved = checkpoints.load(round)
    state = _first(saved.state["state"])
    if state is None:
        return None
    state.row[draw.randrange(state.row.numel())] += 1e-3
    checkpoints.save(round, saved.state, saved.rows)
    return Fault(round, "server", ("checkpoint",))
