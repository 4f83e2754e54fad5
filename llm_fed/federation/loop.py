"""The round loop: the only one. It names no method, moves every message as bytes, and can be killed at any moment."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from llm_fed.errors import ClientError, RunError
from llm_fed.eval.scores import Summary
from llm_fed.federation.clients import Clients, messages_for
from llm_fed.federation.privacy import central, check_upload, released, spent
from llm_fed.federation.progress import Progress, resume, save, scores
from llm_fed.federation.uploads import arrivals
from llm_fed.messages.wire import Message
from llm_fed.method import Method
from llm_fed.requests import Runtime
from llm_fed.runs.folder import Run, rounded
from llm_fed.runs.tracking import Watch
from llm_fed.site import Site

Evaluate = Callable[[Mapping[str, Message], str], Summary | None]  # (what each client is sent, split) -> scores


def federate(
    method: Method,
    clients: Clients,
    server: Site,
    runtime: Runtime,
    run: Run,
    evaluate: Evaluate,
    *,
    rounds: int,
    lr: Callable[[int], float],
    scored: Iterable[str] | None = None,
    on_resume: Callable[[int], None] = lambda round: None,
    most_asked: Callable[[int], int] = lambda round: round,
    noise_seed: int | None = None,
    score_base: Callable[[str], Summary | None] | None = None,
) -> Progress:
    """Run, or continue, a federation to its last round.

    Args:
        runtime: executes what the server awaits.
        evaluate: the scores of `eval.during`'s split, called every `config.eval.every` rounds and after the last.
        lr: the learning rate of a round (1, 2, ...).
        scored: who is scored; default: the clients.
        on_resume: called with the round that a continued run begins with.
        most_asked: in how many of the first so many rounds a client was asked, at most.
        noise_seed: of the server's noise (default: the run's seed); clients must not know it.
        score_base: the scores of a split without any adapter, which are logged as those of round 0.

    Returns:
        The progress after the last round; `restore` goes back to the best one.
    """
    progress = resume(run, method, clients.sites, server)
    if progress.round:
        on_resume(min(progress.round + 1, rounds))
    elif score_base:
        log_base(run, run.config.eval.during, score_base)

    def due(round: int) -> bool:
        every = run.config.eval.every
        return bool(every) and round % every == 0

    def score() -> bool:
        return _score(method, clients.sites if scored is None else scored, run, progress, evaluate)

    # What ends with a round that `eval.every` leaves out scores it all the same, but after its checkpoint: continued
    # with more rounds, it then goes on as if it had had them from the start.
    ends = progress.round > 0 and (due(progress.round) or progress.round == rounds)
    if ends and not any(line["round"] == progress.round for line in scores(run)):
        score()
    privacy = run.config.privacy
    if privacy.clip is not None:
        expected = method.upload_like(method.broadcast(progress.state, server.clients[0]))
        check_upload(expected)
    for round in range(progress.round + 1, rounds + 1):
        watch = Watch(round)
        progress.round = round
        record = clients.exchange(method, progress, lr(round), run, watch)
        uploads = arrivals(run, progress, record)
        if central(privacy):
            seed = run.config.seed if noise_seed is None else noise_seed
            uploads = [released(uploads, expected, run.config, len(server.clients), seed, round)]
        with watch("server"):
            progress.state = _single(
                runtime, server, round, lr(round), method.server_update(server, progress.state, uploads)
            )
        work = runtime.take_work()
        if privacy.clip is not None:
            run.log({"kind": "privacy", "round": round, **spent(run.config, round, most_asked)})
        run.log({"kind": "round", "round": round, "lr": lr(round), **record, "padding": rounded(work.padding)})
        if report := method.report(progress.state):
            run.log({"kind": "server", "round": round, **report})
        improved = False
        if due(round):
            with watch("evaluate"):
                improved = score()
        settings = run.config.checkpoint
        if improved or round == rounds or round % settings.every == 0 or round in settings.keep_rounds:
            with watch("checkpoint"):
                save(run, progress, clients.sites, server)
        if round == rounds and not due(round):
            with watch("evaluate"):
                score()
        run.log_timing({"round": round, **watch.record()})
    return progress


def log_base(run: Run, split: str, score_base: Callable[[str], Summary | None]) -> dict[str, Any] | None:
    """The score line of a split without any adapter, logged unless it is there already; None without that split."""
    for line in run.records():
        if line["kind"] == "score" and (line["round"], line["split"]) == (0, split):
            return line
    if (summary := score_base(split)) is None:
        return None
    line = {"kind": "score", "round": 0, "split": split, **summary.as_json()}
    run.log(line)
    return line


def _score(method: Method, scored: Iterable[str], run: Run, progress: Progress, evaluate: Evaluate) -> bool:
    """Log the scores; whether they are the best so far of those among which the best is sought."""
    settings = run.config.eval
    summary = evaluate(messages_for(method, progress.state, scored, run.config.transport.down), settings.during)
    if summary is None:
        return False
    line = {"kind": "score", "round": progress.round, "split": settings.during, **summary.as_json()}
    run.log(line)
    return progress.consider(line, run.config)


def _single(runtime: Runtime, site: Site, round: int, lr: float, work: Coroutine[Any, Any, Any]) -> Any:
    site.begin(round, lr)
    (outcome,) = runtime.run({site.id: work}).values()
    if isinstance(outcome, ClientError):
        raise RunError(f"round {round}: the server's own training failed: {outcome}") from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
