"""Trains rounds of a run again, step by step, to compare what comes out with what the run took down.

This is a second way through a round, beside `federation.loop` and `federation.clients`: a mistake in how these hand
messages to clients must not repeat itself here. Methods, engines, privacy and the checks of uploads are the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llm_fed.audit.findings import Audit
from llm_fed.basics.errors import RunError
from llm_fed.bench.build import Experiment
from llm_fed.federation.clients import encoded_upload, reported_examples, run_each, then_summed
from llm_fed.federation.privacy import noisy_mean
from llm_fed.federation.progress import InFlight, Progress, memories, restore
from llm_fed.federation.uploads import arrivals
from llm_fed.runs import digests
from llm_fed.runs.checkpoint import Saved
from llm_fed.runs.folder import Run
from llm_fed.runs.rows import Memory
from llm_fed.scoring.scores import Summary
from llm_fed.state.roles import Given
from llm_fed.state.wire import Message, pack, unpack


@dataclass(frozen=True)
class Round:
    """The digests of a round that was trained again, as a line of digests.jsonl has them."""

    round: int
    sent: dict[str, str]
    uploads: dict[str, str]
    memory: dict[str, str]
    state: str


class Replay:
    """A run's clients and server, at the end of some round.

    Args:
        experiment: of the run's configuration; its sites are used up.
        scratch: a run in a folder that is thrown away.
        lines: of the run's metrics.jsonl.
    """

    def __init__(self, experiment: Experiment, scratch: Run, lines: Sequence[dict[str, Any]]):
        self.experiment, self._scratch, self.lines = experiment, scratch, lines
        self.progress = Progress(None)

    @property
    def round(self) -> int:
        return self.progress.round

    @property
    def state(self) -> str:
        """The digest of the server's state."""
        return digests.digest(pack(self.progress.state))

    def begin(self) -> None:
        """Before round 1, from the configuration alone."""
        server = self.experiment.server
        for site in [*self.experiment.clients.values(), server]:
            site.memory = Memory(self._scratch.checkpoints.store)
        self.progress = Progress(self.experiment.method.init(server))

    def restore(self, saved: Saved) -> None:
        """After the round of a checkpoint."""
        self.progress = restore(saved, self.experiment.clients, self.experiment.server)

    def memories(self, of: Iterable[str]) -> dict[str, str]:
        """By name the digests of what these sites and the server remember; of those who remember nothing none."""
        messages = memories(self.experiment.clients, self.experiment.server, of)
        return {id: digests.of_memory(own) for id, own in messages.items()}

    def next(self, report: Audit) -> Round:
        """Train the next round."""
        e, progress, config = self.experiment, self.progress, self.experiment.config
        method, round = e.method, progress.round + 1
        lr = self._lr(round, report)
        asks, state = e.schedule.asks(round), progress.state
        sent = {ask.client: pack(method.broadcast(state, ask.client), config.transport) for ask in asks}
        delays = {ask.client: ask.delay for ask in asks if ask.delay is not None}
        for client in delays:
            e.clients[client].begin(round, lr)
        work = {client: method.client_update(e.clients[client], unpack(sent[client])) for client in delays}
        uploads, flying = {}, []
        then = then_summed(e.clients, method, [*sent], self._scratch, round) if config.privacy.secure else None
        for client, answer in run_each(e.clients, work, e.runtime, then).items():
            if isinstance(answer, Exception):
                continue
            content = encoded_upload(answer, config, self._scratch.secret, round, client)
            uploads[client] = digests.digest(content)
            like = method.upload_like(unpack(sent[client]))
            row = self._scratch.checkpoints.store.row(content)
            examples = reported_examples(e.clients[client], config)
            given = Given.of(like, e.clients[client].num_examples)
            flying.append(InFlight(client, round, round + delays[client], examples, row, given))
        progress.round = round
        progress.in_flight = [*progress.in_flight, *flying]
        arrived = arrivals(self._scratch, method, progress, {})
        if config.privacy.central:
            like, secret = method.upload_like(method.broadcast(state, e.server.clients[0])), self._scratch.secret
            arrived = noisy_mean(arrived, like, config, len(e.server.clients), secret, round)
        e.server.begin(round, lr)
        (outcome,) = e.runtime.run({"server": method.server_update(e.server, state, arrived)}).values()
        if isinstance(outcome, Exception):
            raise RunError(f"round {round}: the server's step failed in the replay: {outcome}") from outcome
        progress.state = outcome
        for site in [*(e.clients[client] for client in delays), e.server]:
            if isinstance(site.memory, Memory):
                site.memory.to_disk()
        hashed = {client: digests.digest(data) for client, data in sent.items()}
        return Round(round, hashed, uploads, self.memories(sent), self.state)

    def _lr(self, round: int, report: Audit) -> float:
        """The learning rate with which the run trained a round, which depends on how many rounds it had at the time: it
        may have been extended."""
        config = self.experiment.config
        lines = (line for line in self.lines if (line["kind"], line["round"]) == ("round", round))
        recorded: float | None = next((line.get("lr") for line in lines), None)
        possible = (replace(config, rounds=rounds).lr(round) for rounds in range(config.rounds, round - 1, -1))
        if recorded is not None and recorded in possible:
            return recorded
        report.find(round, "", "client pass", f"the learning rate {recorded} is not that of the configuration")
        return config.local.lr

    def messages(self, of: Iterable[str]) -> dict[str, Message]:
        """What these would be sent now."""
        method, state, transport = self.experiment.method, self.progress.state, self.experiment.config.transport
        return {id: unpack(pack(method.broadcast(state, id), transport)) for id in of}

    def scores(self, split: str, each: bool = False) -> Summary | None:
        """`each`: as at the end of a run, where the fixed text of `eval.ability` is scored, too."""
        return self.experiment.evaluate(self.messages(self.experiment.scored), split, each=each)

    def finish(self, last: int) -> None:
        """What clients do once, after the last round of the run."""
        e, messages = self.experiment, self.messages(self.experiment.clients)
        for site in e.clients.values():
            site.begin(last + 1, e.config.local.lr)
            site.rounds = last
        run_each(e.clients, {id: e.method.finish(site, messages[id]) for id, site in e.clients.items()}, e.runtime)
