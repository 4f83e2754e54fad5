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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from llm_fed.basics.errors import UserError
from llm_fed.federation.clients import messages_for
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.federation.summing import mean_of, ring_of, summed
from llm_fed.method import Method
from llm_fed.network.bundle import Order
from llm_fed.network.clients import _PAUSE, _SLACK, RemoteClients
from llm_fed.network.link import PendingOrder, Reply, flaw_of
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.tracking import Watch
from llm_fed.secure.cohort import LEAST, Cohort, Terms
from llm_fed.secure.opening import GivenUp, open_sum
from llm_fed.state.roles import Given
from llm_fed.state.wire import Message, entries, pack, unpack


@dataclass
class _ReadyCohort:
    """A cohort, and by client what it has dealt to its neighbours."""

    cohort: Cohort
    said: dict[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass
class _OneSum:
    """What the server knows of a round."""

    run: Run
    round: int
    up: Counter[str] = field(default_factory=Counter)  # bytes, by client
    down: Counter[str] = field(default_factory=Counter)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class SummedClients(RemoteClients):
    """See `RemoteClients`. What is put on its way for each client is the mean of all."""

    _next: _ReadyCohort | None = None

    def exchange(self, method: Method, progress: Progress, lr: float, run: Run, watch: Watch) -> dict[str, Any]:
        known, now = self._remember(progress, run), _OneSum(run, progress.round)
        with watch("broadcast"):
            ready, self._next = self._next, None
            if ready is None or ready.cohort.round != now.round:
                ready = self._begun(now.round)
                self._take_in(ready, self._exchanged(now, self._preparing(ready.cohort)))
            content = self._message(method, progress.state, ready.cohort)
            terms = self._terms(method, ready, content)
            run.digests.sent(dict.fromkeys(terms.present, content))
            for name in terms.present:
                known["asked"][name] = known["asked"].get(name, 0) + 1
        with watch("local"):
            like = method.upload_like(unpack(content))
            terms, vectors, proofs = self._vectors(now, terms, ready, content, like, lr)
        with watch("collect"):
            mean = self._mean(now, terms, ready, vectors, proofs, like)
            return self._record(now, progress, terms, mean, [*vectors], like)

    def _begun(self, round: int) -> _ReadyCohort:
        """A cohort that can make a sum; waits until enough clients are there."""
        announced = False
        while True:
            names = [name for name in self._cohort(round) if name in self.roster.certificates]
            if len(names) >= LEAST:
                return _ReadyCohort(Cohort(self._token, time.time_ns(), round, tuple(names)))
            if not announced:
                announced = True
                self._say(f"{len(names)} clients are there, and a sum needs {LEAST}; waiting")
            time.sleep(_PAUSE)

    def _preparing(self, cohort: Cohort) -> list[Order]:
        common, known = self._common("prepare", cohort), self.roster.certificates
        return [
            Order(name, {**common, "certificates": {other: known[other] for other in cohort.group(name)}})
            for name in cohort.names
        ]

    def _common(self, kind: str, cohort: Cohort) -> dict[str, Any]:
        return {"kind": kind, "run": self._token, "round": cohort.round, "cohort": cohort.says()}

    def _exchanged(self, now: _OneSum, orders: Sequence[Order]) -> list[tuple[Order, Reply]]:
        """The orders with their replies; who did not reply is taken down."""
        replies = self._replies(self._bundles.send(orders), self._config.network.deadline)
        for order, reply in zip(orders, replies, strict=True):
            now.down[order.client] += len(order.content) + len(json.dumps(order.says))
            now.up[order.client] += len(reply.answer) + len(json.dumps(dict(reply.content)))
            if reply.error:
                self._forgot(order.client, reply)
                now.failed.setdefault(order.client, f"{order.says['kind']}: {reply.error}")
        return list(zip(orders, replies, strict=True))

    def _take_in(self, ready: _ReadyCohort, came: Sequence[tuple[Order, Reply]]) -> None:
        for order, reply in came:
            group = {*ready.cohort.group(order.client)} - {order.client}
            if order.says["kind"] == "prepare" and _is_prepared(reply, group):
                ready.said[order.client] = reply.content

    def _message(self, method: Method, state: Message, cohort: Cohort) -> bytes:
        """What all clients of a round are sent."""
        messages = messages_for(method, state, cohort.names, self._config.transport)
        sent = {messages.packed(name) for name in cohort.names}
        if len(sent) > 1:
            raise UserError(f"privacy.secure is for methods that send all clients the same, and "
                            f"{self._config.method['name']} does not; set it to false")  # fmt: skip
        return sent.pop()

    def _terms(self, method: Method, ready: _ReadyCohort, content: bytes) -> Terms:
        largest = self.roster.largest(self.names) if summed(method) == "examples" else 1
        present = tuple(name for name in ready.cohort.names if name in ready.said)
        return Terms(ready.cohort, present, hashlib.sha256(content).hexdigest(), largest)

    def _vectors(
        self, now: _OneSum, terms: Terms, ready: _ReadyCohort, content: bytes, like: Message, lr: float
    ) -> tuple[Terms, dict[str, torch.Tensor], dict[str, Mapping[str, str]]]:
        """The terms with the settings of most clients; by client its masked numbers, and what proves to its neighbours
        that it has sent them."""
        if terms.cohort.lacking(terms.present):
            return terms, {}, {}
        size = entries(like)
        numbers, kept = torch.zeros(size, dtype=torch.int32), self._known["kept"].values()
        common = {**self._common("train", terms.cohort), "lr": lr, "present": terms.present, "largest": terms.largest}
        orders = [
            Order(name, {
                **common, "sealed": {other: ready.said[other]["sealed"][name] for other in terms.neighbours(name)},
                "after": self.answered(name), "kept": sorted({versions.get(name, 0) for versions in kept}),
            }, content, 4 * size)
            for name in terms.present
        ]  # fmt: skip
        wanted, length = Given.of(numbers, None), len(pack(numbers))
        vectors: dict[str, torch.Tensor] = {}
        proofs: dict[str, Mapping[str, str]] = {}
        came = self._exchanged(now, orders)
        said = Counter(str(reply.content.get("settings")) for _, reply in came if not reply.error)
        terms = replace(terms, settings=said.most_common(1)[0][0] if said else "")
        for order, reply in came:
            name, ask = order.client, str(reply.content.get("ask"))
            if reply.error:
                continue
            requested = PendingOrder(
                name, now.round, ask, 0.0, len(content), length + _SLACK, self.roster.examples[name], wanted
            )
            proved: Any = reply.content.get("proofs")
            if reply.content.get("settings") != terms.settings:
                now.refused[name] = "it trains with other settings than most"
                continue
            flaw = flaw_of(requested, reply) or (
                "" if _is_texts(proved, terms.neighbours(name)) else "it proves nothing"
            )
            if flaw:
                now.refused[name] = flaw
            else:
                vectors[name], proofs[name] = unpack(reply.answer, wanted.skeleton), proved
        return terms, vectors, proofs

    def _mean(
        self, now: _OneSum, terms: Terms, ready: _ReadyCohort, vectors: Mapping[str, torch.Tensor],
        proofs: Mapping[str, Mapping[str, str]], like: Message,
    ) -> Message:  # fmt: skip
        """The mean of the uploads; None where the round is given up. The next round is prepared meanwhile."""
        cohort, alive = terms.cohort, [*vectors]
        why, orders, ahead = cohort.lacking(alive), [], None
        for name in () if why else alive:
            there = [other for other in cohort.group(name) if other in vectors]
            proved = {other: proofs[other][name] for other in there if other != name}
            orders.append(Order(name, {**self._common("reveal", cohort), "alive": there, "proofs": proved}))
        if now.round < self._config.rounds and len(self._idle()) >= LEAST:
            ahead = self._next = self._begun(now.round + 1)
            orders += self._preparing(ahead.cohort)
        came = self._exchanged(now, orders)
        if ahead:
            self._take_in(ahead, came)
        told = {order.client: r.content for order, r in came if order.says["kind"] == "reveal" and not r.error}
        total = torch.zeros(entries(like), dtype=torch.int32)
        for vector in vectors.values():
            total += vector
        try:
            if why:
                raise GivenUp(why)
            open_sum(terms, ready.said, alive, total, told)
        except GivenUp as error:
            log_event(now.run, now.round, "", "round given up", str(error))
            return None
        weights = [min(self.roster.examples[name], terms.largest) for name in alive]
        return mean_of(total, ring_of(self._config.privacy, len(cohort.names)), like, weights, terms.largest)

    def _record(
        self, now: _OneSum, progress: Progress, terms: Terms, mean: Message, alive: Sequence[str], like: Message
    ) -> dict[str, Any]:
        """Put the mean on its way instead of each upload, and log each client's line."""
        if mean is not None:
            row, given = now.run.checkpoints.store.row(pack(mean)), Given.of(like, None)
            for name in sorted(alive):
                weight = self.roster.weight(name, self.names)
                progress.in_flight.append(InFlight(name, now.round, now.round, weight, row, given))
                self._known["answered"][name] = now.round
                line = {"kind": "client", "round": now.round, "client": name, "examples": self.roster.examples[name]}
                now.run.log({**line, "bytes_up": now.up[name], "bytes_down": now.down[name], "staleness": 0})
        for event, reasons in (("refused upload", now.refused), ("client failed", now.failed)):
            for name, reason in sorted(reasons.items()):
                log_event(now.run, now.round, name, event, reason)
        return {
            "asked": len(terms.present), "failed": len(now.failed), "dropped_out": 0, "bytes_up": now.up.total(),
            "refused": len(now.refused), "late": 0, "bytes_down": now.down.total(),
        }  # fmt: skip


def _is_prepared(reply: Reply, group: set[str]) -> bool:
    """Whether it can be what `Party.prepare` answers; others check what is sealed."""
    said = reply.content
    whole = all(isinstance(said.get(key), str) for key in ("public", "own")) and _is_texts(said.get("sealed"), group)
    return not reply.error and whole and _is_key(said["public"])


def _is_key(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) == 32
    except ValueError:
        return False


def _is_texts(said: Any, names: Sequence[str] | set[str]) -> bool:
    return isinstance(said, dict) and all(isinstance(said.get(name), str) for name in names)
