"""The round loop: the only one. It names no method, moves every message as bytes, and can be killed at any moment."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol

from llm_fed import inbox
from llm_fed.checkpoint import Saved
from llm_fed.errors import ClientError, RunError, UserError
from llm_fed.eval.scores import Summary
from llm_fed.inbox import InFlight
from llm_fed.method import Method, Upload
from llm_fed.rows import Memory, Row
from llm_fed.run import Run
from llm_fed.schedule import Ask, Schedule
from llm_fed.site import Site
from llm_fed.wire import Message, pack, unpack


class Runtime(Protocol):
    """Runs the coroutines of sites; see `runtime/`."""

    def run(self, work: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]: ...

    def take_work(self) -> Any: ...


Evaluate = Callable[[Mapping[str, Message], str], Summary | None]  # (what each client is sent, split) -> scores


@dataclass
class Progress:
    """Where a run stands after a round; this is what a checkpoint holds."""

    state: Message
    round: int = 0
    in_flight: list[InFlight] = field(default_factory=list)
    best_round: int = 0  # 0: none yet
    best_score: float = float("-inf")


def federate(
    method: Method,
    clients: Mapping[str, Site],
    server: Site,
    schedule: Schedule,
    runtime: Runtime,
    run: Run,
    evaluate: Evaluate,
    *,
    rounds: int,
    lr: Callable[[int], float],
    scored: Iterable[str] | None = None,
    on_resume: Callable[[int], None] = lambda round: None,
) -> Progress:
    """Run, or continue, a federation to its last round.

    Args:
        evaluate: the scores of `eval.during`'s split, called every `config.eval.every` rounds and after the last.
        lr: the learning rate of a round (1, 2, ...).
        scored: who is scored; default: the clients.
        on_resume: called with the round that a continued run begins with.

    Returns:
        The progress after the last round; `restore` goes back to the best one.
    """
    progress = _resume(run, method, clients, server)
    if progress.round:
        on_resume(min(progress.round + 1, rounds))
    for round in range(progress.round + 1, rounds + 1):
        watch = _Watch()
        progress.round = round
        asks = schedule.asks(round)
        with watch("broadcast"):
            messages = _broadcast(method, progress.state, [ask.client for ask in asks])
        with watch("local"):
            answered = {ask.client: messages[ask.client] for ask in asks if ask.delay is not None}
            answers = _ask(method, clients, answered, runtime, round, lr(round))
        with watch("collect"):
            record = _collect(method, clients, asks, run, progress, messages, answers)
            uploads = _arrivals(run, progress, record)
        with watch("server"):
            progress.state = _single(
                runtime, server, round, lr(round), method.server_update(server, progress.state, uploads)
            )
        work = runtime.take_work()
        run.log({"kind": "round", "round": round, "lr": lr(round), **record, "padding": round_(work.padding)})
        if report := method.report(progress.state):
            run.log({"kind": "server", "round": round, **report})
        due = round == rounds or (run.config.eval.every and round % run.config.eval.every == 0)
        improved = False
        if due:
            with watch("evaluate"):
                improved = _score(method, clients if scored is None else scored, run, progress, evaluate, rounds)
        settings = run.config.checkpoint
        if improved or round == rounds or round % settings.every == 0 or round in settings.keep_rounds:
            with watch("checkpoint"):
                save(run, progress, clients, server)
        run.log_timing({"round": round, **watch.record()})
    return progress


def finish(
    method: Method,
    clients: Mapping[str, Site],
    runtime: Runtime,
    run: Run,
    progress: Progress,
    *,
    round: int,
    lr: float,
) -> dict[str, Message]:
    """`Method.finish` at every client, once after the last round; a client that fails is logged and goes without.

    Returns:
        What each client was sent.
    """
    messages = messages_for(method, progress.state, clients)
    for site in clients.values():
        site.begin(round, lr)
    work = {name: method.finish(site, messages[name]) for name, site in clients.items()}
    for name, answer in _attempt(clients, work, runtime).items():
        if isinstance(answer, Exception):
            _failed(run, round, name, answer)
    return messages


def messages_for(method: Method, state: Message, clients: Iterable[str]) -> dict[str, Message]:
    """What each client would be sent now, in memory of its own."""
    return {client: unpack(sent) for client, sent in _broadcast(method, state, clients).items()}


def save(run: Run, progress: Progress, clients: Mapping[str, Site], server: Site) -> None:
    """Write the checkpoint of `progress.round`, then delete those that are no longer kept."""
    rows: dict[str, Row | Mapping[str, Row]] = {}
    for owner, site in _owners(clients, server):
        assert isinstance(site.memory, Memory)  # since `_resume`
        if site.memory:
            rows[owner] = site.memory.rows
    flying = []
    for item in progress.in_flight:
        key = f"flight/{item.asked}/{item.client}"
        rows[key] = item.content
        flying.append([key, item.client, item.asked, item.arrival, item.num_examples, item.expected])
    state = {
        "state": progress.state,
        "best_round": progress.best_round,
        "best_score": progress.best_score,
        "in_flight": flying,
        "metrics": run.mark(),
    }
    run.checkpoints.save(progress.round, state, rows)
    settings = run.config.checkpoint
    newest = run.checkpoints.rounds()[-settings.keep :]
    run.checkpoints.prune(
        lambda round: round in newest or round in settings.keep_rounds or round == progress.best_round
    )


def restore(saved: Saved, clients: Mapping[str, Site], server: Site | None = None) -> Progress:
    """Put what a checkpoint holds back: the memories of the clients and the server, and the rest as it is returned."""
    for owner, site in _owners(clients, server):
        site.memory = saved.memory(owner)
    held, flying = saved.state, []
    for key, client, asked, arrival, examples, expected in held["in_flight"]:
        content = saved.rows[key]
        assert isinstance(content, Row)  # as `save` put it there
        flying.append(InFlight(client, asked, arrival, examples, content, expected))
    return Progress(held["state"], saved.round, flying, held["best_round"], held["best_score"])


def round_(value: float) -> float:
    """A figure for metrics.jsonl: six significant digits are enough to read and survive a change of the last bit."""
    return float(f"{value:.6g}")


def _resume(run: Run, method: Method, clients: Mapping[str, Site], server: Site) -> Progress:
    saved = run.checkpoints.latest()
    if saved is None:
        run.rewind(0)
        for _, site in _owners(clients, server):
            site.memory = Memory(run.checkpoints.store)
        return Progress(method.init(server))
    run.rewind(saved.state["metrics"])
    return restore(saved, clients, server)


def _owners(clients: Mapping[str, Site], server: Site | None) -> Iterator[tuple[str, Site]]:
    """The sites whose memories a checkpoint holds, each with the key of its rows there."""
    yield from ((f"memory/{name}", site) for name, site in clients.items())
    if server is not None:
        yield "server", server


def _broadcast(method: Method, state: Message, clients: Iterable[str]) -> dict[str, bytes]:
    packed: dict[int, tuple[Message, bytes]] = {}  # equal objects are packed once; the pair keeps their ids alive
    sent = {}
    for client in clients:
        message = method.broadcast(state, client)
        if id(message) not in packed:
            packed[id(message)] = (message, pack(message))
        sent[client] = packed[id(message)][1]
    return sent


def _ask(
    method: Method, clients: Mapping[str, Site], messages: Mapping[str, bytes], runtime: Runtime, round: int, lr: float
) -> dict[str, Any]:
    for name in messages:
        clients[name].begin(round, lr)
    work = {name: method.client_update(clients[name], unpack(sent)) for name, sent in messages.items()}
    answers = _attempt(clients, work, runtime)
    failed = [answer for answer in answers.values() if isinstance(answer, Exception)]
    if failed and len(failed) == len(answers):
        raise RunError(f"every client of round {round} failed; the first one: {failed[0]}") from failed[0]
    return answers


def _attempt(clients: Mapping[str, Site], work: Mapping[str, Coroutine[Any, Any, Any]], runtime: Runtime) -> Any:
    """What the coroutines return, or the exceptions that ended them; who failed is as if it had not been asked."""
    before = {name: copy(clients[name].memory) for name in work}
    answers = runtime.run(work)
    for name, answer in answers.items():
        if isinstance(answer, UserError | RunError):
            raise answer
        if isinstance(answer, Exception):
            clients[name].memory = before[name]
    return answers


def _collect(
    method: Method,
    clients: Mapping[str, Site],
    asks: Sequence[Ask],
    run: Run,
    progress: Progress,
    messages: Mapping[str, bytes],
    answers: Mapping[str, Any],
) -> dict[str, Any]:
    """Put the answers on their way, and log each client's line; who drops out was sent its message and did no work."""
    up = down = failed = dropped = 0
    means = []
    for ask in asks:
        name = ask.client
        down += len(messages[name])
        if ask.delay is None:
            dropped += 1
            run.log({"kind": "drop-out", "round": progress.round, "client": name})
            continue
        answer, site = answers[name], clients[name]
        if isinstance(answer, Exception):
            failed += 1
            _failed(run, progress.round, name, answer)
            continue
        content = pack(answer)
        up += len(content)
        expected = inbox.skeleton(method.upload_like(unpack(messages[name])))
        progress.in_flight.append(
            InFlight(
                name,
                progress.round,
                progress.round + ask.delay,
                site.num_examples,
                run.checkpoints.store.row(content),
                expected,
            )
        )
        record: dict[str, Any] = {"kind": "client", "round": progress.round, "client": name}
        if site.losses:
            means.append(round_(statistics.fmean(site.losses)))
            record |= {"loss": means[-1], "steps": len(site.losses)}
        record |= {"examples": site.num_examples, "bytes_up": len(content), "bytes_down": len(messages[name])}
        run.log(record | {"staleness": ask.delay})
    total = {"asked": len(messages), "failed": failed, "dropped_out": dropped, "bytes_up": up, "bytes_down": down}
    return total | ({"loss": round_(statistics.fmean(means))} if means else {})


def _arrivals(run: Run, progress: Progress, record: dict[str, Any]) -> list[Upload]:
    """Take what is due off its way, in the order (arrival, client), and refuse what is not as it should be."""
    due = sorted(
        (item for item in progress.in_flight if item.arrival <= progress.round),
        key=lambda item: (item.arrival, item.client),
    )
    progress.in_flight = [item for item in progress.in_flight if item.arrival > progress.round]
    contents = [item.content.message() for item in due]
    bound = run.config.norm_bound if progress.round > inbox.FREE_ROUNDS else None
    flaws = inbox.flaws(contents, [item.expected for item in due], bound)
    for item, flaw in zip(due, flaws, strict=True):
        if flaw:
            _event(run, progress.round, item.client, "refused upload", flaw)
    uploads = [
        Upload(item.client, item.num_examples, progress.round - item.asked, content)
        for item, content, flaw in zip(due, contents, flaws, strict=True)
        if not flaw
    ]
    record |= {"arrived": len(uploads), "refused": len(due) - len(uploads)}
    return uploads


def _score(
    method: Method, scored: Iterable[str], run: Run, progress: Progress, evaluate: Evaluate, rounds: int
) -> bool:
    """Log the scores; whether they are the best so far of those among which the best is sought."""
    settings = run.config.eval
    summary = evaluate(messages_for(method, progress.state, scored), settings.during)
    if summary is None:
        return False
    run.log({"kind": "score", "round": progress.round, "split": settings.during, **summary.as_json()})
    to_come = math.ceil((rounds - progress.round) / settings.every) if settings.every else 0
    too_early = settings.of_last is not None and to_come >= settings.of_last
    if too_early or summary.mean <= progress.best_score:
        return False
    progress.best_round, progress.best_score = progress.round, summary.mean
    return True


def _single(runtime: Runtime, site: Site, round: int, lr: float, work: Coroutine[Any, Any, Any]) -> Any:
    site.begin(round, lr)
    (outcome,) = runtime.run({site.id: work}).values()
    if isinstance(outcome, ClientError):
        raise RunError(f"round {round}: the server's own training failed: {outcome}") from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _failed(run: Run, round: int, client: str, error: Exception) -> None:
    _event(run, round, client, "client failed", f"{type(error).__name__}: {error}")


def _event(run: Run, round: int, client: str, event: str, reason: str) -> None:
    run.log({"kind": "event", "round": round, "client": client, "event": event, "reason": reason})


class _Watch:
    """Seconds per part of a round."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, part: str):
        start = time.perf_counter()
        yield
        self._parts[part] = round(time.perf_counter() - start, 4)

    def record(self) -> dict[str, Any]:
        return {"seconds": round(time.perf_counter() - self._start, 4), "parts": self._parts}
