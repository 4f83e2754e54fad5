"""How the round loop reaches the clients: what each is sent, what it does with it, and its answer on its way."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Protocol

from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.names import rounded
from llm_fed.basics.rng import Secret
from llm_fed.federation.privacy import protected, shown, spent, spent_by
from llm_fed.federation.progress import InFlight, Progress
from llm_fed.federation.schedule import Ask, Schedule, most_asked
from llm_fed.federation.summing import RoundGivenUp, together
from llm_fed.method import Method
from llm_fed.method.client import Client
from llm_fed.method.requests import Runtime
from llm_fed.runs.folder import Run, log_event, log_failure
from llm_fed.runs.tracking import Watch
from llm_fed.settings.config import Config
from llm_fed.state.roles import Given
from llm_fed.state.wire import Message, pack, unpack

Answers = dict[str, Message | Exception]  # by client, its answer or what ended its work
Then = Callable[[Answers], Answers]
Updates = Mapping[str, Coroutine[Any, Any, Message]]  # by client its work


class Clients(Protocol):
    """The clients of a run, in this process or elsewhere."""

    @property
    def sites(self) -> Mapping[str, Client]:
        """Those whose memories lie in this process, hence in its checkpoints."""

    def take(self, progress: Progress) -> None:
        """Go on from this progress, of a checkpoint or of a run that begins."""

    def spent(self, config: Config, round: int) -> dict[str, Json]:
        """What metrics.jsonl says of the privacy after a round, see `privacy.spent`."""

    def exchange(self, method: Method, progress: Progress, lr: float, run: Run, watch: Watch) -> dict[str, Json]:
        """Send each client of the round's cohort its message, and put what is answered on its way (`in_flight` of
        `progress`). Returns the round's line in metrics.jsonl: how many were asked and failed, bytes, the mean loss."""


@dataclass
class LocalClients:
    """Clients whose sites are in this process; how late they answer is the schedule's virtual time."""

    sites: Mapping[str, Client]
    schedule: Schedule
    runtime: Runtime

    def take(self, progress: Progress) -> None:
        """Nothing: `resume` has put the sites' memories back."""

    def spent(self, config: Config, round: int) -> dict[str, Json]:
        return spent(config, round, lambda rounds: most_asked(self.schedule, rounds), self.sites.values())

    def exchange(self, method: Method, progress: Progress, lr: float, run: Run, watch: Watch) -> dict[str, Json]:
        asks = self.schedule.asks(progress.round)
        with watch("broadcast"):
            sent = Messages(method, progress.state, dict.fromkeys(ask.client for ask in asks), run.config.transport)
            messages = sent.all_packed()
            run.digests.sent(messages)
        with watch("local"):
            answered = {ask.client: messages[ask.client] for ask in asks if ask.delay is not None}
            secure = run.config.privacy.secure
            then = then_summed(self.sites, method, list(messages), run, progress.round) if secure else None
            answers = self._ask(method, answered, progress.round, lr, then)
        with watch("collect"):
            return self._collect(asks, run, progress, sent, messages, answers)

    def _ask(self, method: Method, messages: Mapping[str, bytes], round: int, lr: float, then: Then | None) -> Answers:
        """What each client answers to its message. `then`: see `run_each`."""
        for name in messages:
            self.sites[name].begin(round, lr)
        work = {name: method.client_update(self.sites[name], unpack(sent)) for name, sent in messages.items()}
        answers = run_each(self.sites, work, self.runtime, then)
        failed = [a for a in answers.values() if isinstance(a, Exception) and not isinstance(a, RoundGivenUp)]
        if failed and len(failed) == len(answers):
            raise RunError(f"every client of round {round} failed; the first one: {failed[0]}") from failed[0]
        return answers

    def _collect(
        self,
        asks: Sequence[Ask],
        run: Run,
        progress: Progress,
        sent: Messages,
        messages: Mapping[str, bytes],
        answers: Answers,
    ) -> dict[str, Json]:
        """Put the answers on their way, and log each client's line; who drops out had its message and did no work."""
        up = down = failed = dropped = 0
        means = []
        for ask in asks:
            name, bytes_down = ask.client, len(messages[ask.client])
            down += bytes_down
            if ask.delay is None:
                dropped += 1
                run.log({"kind": "drop-out", "round": progress.round, "client": name})
                continue
            answer, site = answers[name], self.sites[name]
            if isinstance(answer, Exception):
                failed += 1
                log_failure(run, progress.round, name, answer)
                continue
            content = encoded_upload(answer, run.config, run.secret, progress.round, name)
            up += len(content)
            facts: dict[str, Json] = {}
            if site.losses:
                means.append(rounded(statistics.fmean(site.losses)))
                facts |= {"loss": means[-1], "steps": len(site.losses)}
            facts |= {"examples": site.num_examples, "bytes_up": len(content), "bytes_down": bytes_down}
            if run.config.privacy.by_example:
                facts["epsilon"] = shown(spent_by(run.config.privacy, site))
            arrival, weight = progress.round + ask.delay, reported_examples(site, run.config)
            row, given = run.checkpoints.store.row(content), sent.given(messages[name], site.num_examples)
            progress.send(InFlight(name, progress.round, arrival, weight, row, given), run, facts)
        total = {"asked": len(asks), "failed": failed, "dropped_out": dropped, "bytes_up": up, "bytes_down": down}
        return total | ({"loss": rounded(statistics.fmean(means))} if means else {})


def finish(
    method: Method, sites: Mapping[str, Client], runtime: Runtime, run: Run, progress: Progress, *, round: int
) -> None:
    """`Method.finish` at every client, in the `round` after the last; who fails is logged and goes without."""
    for site in sites.values():
        site.begin(round, run.config.local.lr)
        site.rounds = round - 1
    if type(method).finish is Method.finish:  # does nothing
        return
    messages = Messages(method, progress.state, sites, run.config.transport)
    work = {name: method.finish(site, messages[name]) for name, site in sites.items()}
    for name, answer in run_each(sites, work, runtime).items():
        if isinstance(answer, Exception):
            log_failure(run, round, name, answer)
    tokens, steps = runtime.take_work().tokens, sum(len(site.losses) for site in sites.values())
    run.log({"kind": "finish", "round": round, "steps": steps, "tokens": tokens})
    run.lap("finish")


@dataclass(eq=False, repr=False)
class Messages(Mapping[str, Message]):
    """By client what it would be sent now, made whenever it is looked up, hence in memory of its own. `state`: the
    server's. `encoding`: `transport`."""

    method: Method
    state: Message
    clients: Collection[str]
    encoding: str | None = None
    _last: tuple[Message, bytes] = (object(), b"")  # packed last: often all are sent the same
    _given: tuple[bytes, Given] = (b"", Given())  # likewise

    def packed(self, client: str) -> bytes:
        """The message as it travels."""
        if client not in self.clients:
            raise KeyError(client)
        message = self.method.broadcast(self.state, client)
        if message is not self._last[0]:
            self._last = (message, pack(message, self.encoding))
        return self._last[1]

    def all_packed(self) -> dict[str, bytes]:
        """By client the message as it travels; what several are sent alike, as a group's model, is in memory once."""
        unlike: dict[bytes, bytes] = {}
        return {client: unlike.setdefault(sent := self.packed(client), sent) for client in self.clients}

    def given(self, sent: bytes, examples: int | None) -> Given:
        """What the answer to a packed message must be like, which is kept beside the request. `examples`: how many the
        client has."""
        if sent is not self._given[0]:
            self._given = (sent, Given.of(self.method.upload_like(unpack(sent)), None))
        return replace(self._given[1], examples=examples)

    def __getitem__(self, client: str) -> Message:
        return unpack(self.packed(client))

    def __iter__(self) -> Iterator[str]:
        return iter(self.clients)

    def __len__(self) -> int:
        return len(self.clients)


def encoded_upload(answer: Message, config: Config, secret: Secret, round: int, client: str) -> bytes:
    """What a client uploads: its answer, protected as `config.privacy` says, in the form of `transport`. `secret`: of
    the noise. The server must not know it, so where clients are other parties, each has one of its own."""
    if config.privacy.secure:  # `answer` is the mean of all, of protected ones
        return pack(answer)
    return pack(protected(answer, config.privacy, secret, round, client), config.transport)


def reported_examples(site: Client, config: Config) -> int:
    """The number of examples by which the server weighs a client; with privacy on it is told none."""
    return site.num_examples if config.privacy.clip is None else 1


def then_summed(sites: Mapping[str, Client], method: Method, requested: Sequence[str], run: Run, round: int) -> Then:
    """What `privacy.secure` makes of the answers of a round: their mean in each place. `requested`: the cohort."""

    def mean(answers: Answers) -> Answers:
        examples = {name: reported_examples(sites[name], run.config) for name in answers}
        found, long = together(answers, examples, requested, run.config, method, run.secret, round)
        for client, why in long.items():
            log_event(run, round, client, "clipped", why)
        return found

    return mean


def run_each(sites: Mapping[str, Client], work: Updates, runtime: Runtime, then: Then | None = None) -> Answers:
    """What the coroutines return, or the exceptions that ended them; who failed is as if it had not been asked. `then`:
    what is made of all answers together."""
    before = {name: copy(sites[name].memory) for name in work}
    answers: Answers = runtime.run(work)
    answers = then(answers) if then else answers
    for name, answer in answers.items():
        if isinstance(answer, UserError | RunError):
            raise answer
        if isinstance(answer, Exception):
            sites[name].memory = before[name]
    return answers
