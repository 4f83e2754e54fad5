"""Clients on other machines whose updates the server adds up without seeing any (`privacy.secure`).

Beside those of `clients`, there are two more kinds of orders; see `llm_fed.secure`:

    prepare    run, round, cohort, certificates      -> public, own, sealed
    train      ... cohort, present, largest, sealed  -> ... proofs; masked numbers
    reveal     run, round, cohort, alive, proofs     -> locks, locked

The next round is prepared with the orders to reveal. Nothing is awaited longer than `network.deadline`, and who has not
answered by then has vanished; a server that is killed meanwhile begins the round again with another cohort.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard, cast

import torch

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.federation.clients import Messages
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.federation.summing import mean_of, ring_of, summed
from llm_fed.method import Method
from llm_fed.network.clients import _PAUSE, _SLACK, RemoteClients
from llm_fed.network.link import Order, PendingOrder, Reply, flaw_of
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.tracking import Watch
from llm_fed.secure.cohort import LEAST, Cohort, Terms
from llm_fed.secure.opening import GivenUp, open_sum
from llm_fed.secure.party import Dealt, Revealed
from llm_fed.state.roles import Given
from llm_fed.state.wire import Message, entries, pack, unpack


@dataclass
class _Sum:
    """What the server knows of a round."""

    cohort: Cohort
    prepared: dict[str, Dealt] = field(default_factory=dict)  # by client what it has dealt to its neighbours
    vectors: dict[str, torch.Tensor] = field(default_factory=dict)  # masked numbers
    proofs: dict[str, Mapping[str, str]] = field(default_factory=dict)  # by which neighbours know that it has answered
    up: Counter[str] = field(default_factory=Counter)  # bytes
    down: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class SummedClients(RemoteClients):
    """See `RemoteClients`. What is put on its way for each client is the mean of all."""

    _next: _Sum | None = None

    def exchange(self, method: Method, progress: Progress, lr: float, run: Run, watch: Watch) -> dict[str, Json]:
        self._remember(progress, run)
        with watch("broadcast"):
            now, self._next = self._next, None
            if now is None or now.cohort.round != progress.round:
                now = self._begun(progress.round)
                self._take_in(now, self._exchanged(now, self._preparing(now.cohort)))
            content = self._message(method, progress.state, now.cohort)
            present = tuple(name for name in now.cohort.names if name in now.prepared)
            largest = self.roster.largest(self.names) if summed(method) == "examples" else 1
            terms = Terms(now.cohort, present, hashlib.sha256(content).hexdigest(), largest)
            self._asked(dict.fromkeys(present, content), run)
        with watch("local"):
            like = method.upload_like(unpack(content))
            if not now.cohort.lacking(present):
                terms = self._collect_numbers(now, terms, content, entries(like), lr)
        with watch("collect"):
            if (mean := self._mean(now, terms, like, run)) is not None:
                self._put_on_its_way(now, progress, run, mean, Given.of(like, None))
        for event, reasons in (("refused upload", now.refused), ("client failed", now.failed)):
            for name, reason in sorted(reasons.items()):
                log_event(run, progress.round, name, event, reason)
        total: dict[str, Json] = {"asked": len(present), "failed": len(now.failed), "refused": len(now.refused)}
        return total | {"late": 0, "dropped_out": 0, "bytes_up": now.up.total(), "bytes_down": now.down.total()}

    def _begun(self, round: int) -> _Sum:
        """A cohort that can make a sum; waits until enough clients are there."""
        while True:
            names = [name for name in self._cohort(round) if name in self.roster.certificates]
            if len(names) >= LEAST:
                return _Sum(Cohort(self._token, time.time_ns(), round, tuple(names)))
            self.roster.say_once(f"{len(names)} clients are there for round {round}, and a sum needs {LEAST}; waiting")
            time.sleep(_PAUSE)

    def _preparing(self, cohort: Cohort) -> list[Order]:
        common, known = self._common("prepare", cohort), self.roster.certificates
        return [
            Order(name, {**common, "certificates": {other: known[other] for other in cohort.group(name)}})
            for name in cohort.names
        ]

    def _common(self, kind: str, cohort: Cohort) -> dict[str, Json]:
        return {"kind": kind, "run": self._token, "round": cohort.round, "cohort": cohort.says()}

    def _exchanged(self, now: _Sum, orders: Sequence[Order]) -> list[tuple[Order, Reply]]:
        """The orders with their replies; who did not reply is taken down."""
        replies = self._replies(self._bundles.send(orders), self._config.network.deadline)
        for order, reply in zip(orders, replies, strict=True):
            now.down[order.client] += len(order.content) + len(json.dumps(order.says))
            now.up[order.client] += len(reply.answer) + len(json.dumps(dict(reply.content)))
            if reply.error:
                self._forgot(order.client, reply)
                now.failed.setdefault(order.client, f"{order.says['kind']}: {reply.error}")
        return list(zip(orders, replies, strict=True))

    def _take_in(self, now: _Sum, came: Sequence[tuple[Order, Reply]]) -> None:
        for order, reply in came:
            group = {*now.cohort.group(order.client)} - {order.client}
            if order.says["kind"] == "prepare" and _is_prepared(reply, group):
                now.prepared[order.client] = cast(Dealt, reply.content)

    def _message(self, method: Method, state: Message, cohort: Cohort) -> bytes:
        """What all clients of a round are sent."""
        sent = {*Messages(method, state, cohort.names, self._config.transport).all_packed().values()}
        if len(sent) > 1:
            name = self._config.method["name"]
            raise UserError(
                f"privacy.secure is for methods that send all clients the same, and {name} does not; set it to false"
            )
        return sent.pop()

    def _collect_numbers(self, now: _Sum, terms: Terms, content: bytes, size: int, lr: float) -> Terms:
        """Have the clients train, and take in what is without flaw; the terms with the settings of most."""
        common = {**self._common("train", now.cohort), "lr": lr, "present": terms.present, "largest": terms.largest}
        orders = []
        for name in terms.present:
            sealed = {other: now.prepared[other]["sealed"][name] for other in terms.neighbours(name)}
            orders.append(Order(name, {**common, "sealed": sealed, **self._memory(name)}, content, 4 * size))
        wanted = Given.of(torch.zeros(size, dtype=torch.int32), None)
        came = [(order.client, reply) for order, reply in self._exchanged(now, orders) if not reply.error]
        said = Counter(str(reply.content.get("settings")) for _, reply in came)
        terms = replace(terms, settings=said.most_common(1)[0][0] if said else "")
        for name, reply in came:
            given, ask = replace(wanted, examples=self.roster.examples[name]), str(reply.content.get("ask"))
            requested = PendingOrder(name, now.cohort.round, ask, 0.0, len(content), 4 * size + _SLACK, given)
            proofs = reply.content.get("proofs")
            if reply.content.get("settings") != terms.settings:
                now.refused[name] = "it trains with other settings than most"
            elif flaw := flaw_of(requested, reply):
                now.refused[name] = flaw
            elif not _is_texts(proofs, terms.neighbours(name)):
                now.refused[name] = "it proves nothing"
            else:
                now.vectors[name], now.proofs[name] = unpack(reply.answer, wanted.skeleton), proofs
        return terms

    def _mean(self, now: _Sum, terms: Terms, like: Message, run: Run) -> Message:
        """The mean of the uploads; None where the round is given up. The next round is prepared meanwhile."""
        cohort, alive, orders = now.cohort, [*now.vectors], []
        why = cohort.lacking(alive)
        for name in () if why else alive:
            there = [other for other in cohort.group(name) if other in now.vectors]
            proofs = {other: now.proofs[other][name] for other in there if other != name}
            orders.append(Order(name, {**self._common("reveal", cohort), "alive": there, "proofs": proofs}))
        if cohort.round < self._config.rounds and len(self._idle(cohort.round + 1)) >= LEAST:
            self._next = self._begun(cohort.round + 1)
            orders += self._preparing(self._next.cohort)
        came = self._exchanged(now, orders)
        if self._next:
            self._take_in(self._next, came)
        revealed = [(order, reply) for order, reply in came if order.says["kind"] == "reveal" and not reply.error]
        told = {order.client: cast(Revealed, reply.content) for order, reply in revealed}
        total = sum(now.vectors.values(), torch.zeros(entries(like), dtype=torch.int32))
        try:
            if why:
                raise GivenUp(why)
            open_sum(terms, now.prepared, alive, total, told)
        except GivenUp as error:
            log_event(run, cohort.round, "", "round given up", str(error))
            return None
        weights = [min(self.roster.examples[name], terms.largest) for name in alive]
        return mean_of(total, ring_of(self._config.privacy, len(cohort.names)), like, weights, terms.largest)

    def _put_on_its_way(self, now: _Sum, progress: Progress, run: Run, mean: Message, given: Given) -> None:
        """The mean in the place of each upload."""
        row, round = run.checkpoints.store.row(pack(mean)), progress.round
        for name in sorted(now.vectors):
            facts = {"examples": self.roster.examples[name], "bytes_up": now.up[name], "bytes_down": now.down[name]}
            item = InFlight(name, round, round, self.roster.weight(name, self.names), row, given)
            progress.send(item, run, facts)
            self._known["answered"][name] = round


def _is_prepared(reply: Reply, group: set[str]) -> bool:
    """Whether it can be what `Party.prepare` answers; others check what is sealed."""
    said = reply.content
    if reply.error or not _is_texts(said, ("public", "own")) or not _is_texts(said.get("sealed"), group):
        return False
    try:
        return len(bytes.fromhex(said["public"])) == 32
    except ValueError:
        return False


def _is_texts(said: Json, names: Collection[str]) -> TypeGuard[Mapping[str, str]]:
    return isinstance(said, dict) and all(isinstance(said.get(name), str) for name in names)
