"""The round loop: the only one. It names no method, moves every message as bytes, and can be killed at any moment."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from llm_fed.basics import signs
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import ClientError, RunError
from llm_fed.basics.names import rounded
from llm_fed.basics.rng import Secret
from llm_fed.federation import summing
from llm_fed.federation.clients import Clients, Messages
from llm_fed.federation.privacy import check_upload, noisy_mean
from llm_fed.federation.progress import (
    UNSCORED,
    Progress,
    end_early,
    memories,
    prune,
    resume,
    save,
    scores,
    stop_reason,
)
from llm_fed.federation.uploads import arrivals, compared
from llm_fed.method import Method
from llm_fed.method.requests import Runtime
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.runs.checkpoint import rounds_in
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.tracking import Watch
from llm_fed.scoring.scores import Summary
from llm_fed.state import roles
from llm_fed.state.outline import infinite
from llm_fed.state.wire import Message


@dataclass(frozen=True)
class Federation:
    """Who takes part, and what they compute."""

    method: Method
    clients: Clients
    server: Server
    runtime: Runtime  # executes what the server awaits
    secret: Secret | None = None  # of the server's noise, where it is not the run's


@dataclass(frozen=True)
class Scoring:
    """How a federation is scored while it trains."""

    who: Collection[str]  # is sent what is scored
    evaluate: Callable[[Messages, str], Summary | None]  # (what each is sent, split) -> scores
    base: Callable[[str], Summary | None] | None = None  # the scores of a split without any adapter, as round 0


def federate(
    federation: Federation,
    run: Run,
    scoring: Scoring | None = None,
    *,
    on_resume: Callable[[int], None] = lambda round: None,
    on_begin: Callable[[], None] = lambda: None,
    on_trained: Callable[[], None] = lambda: None,
    asked_to_end: Callable[[], str] = lambda: "",
) -> Progress:
    """Run, or continue, a federation to the last round of `run.config`.

    Args:
        scoring: of `eval.during`'s split, every `eval.every` rounds and after the last; None: nothing is scored.
        on_resume: called with the round that a continued run begins with.
        on_begin: called before anything is logged of a run that begins.
        on_trained: called when a round is done, before it is asked whether the run ends and before its checkpoint, and
            once more after scores that come behind that. If it raises, the round is saved first.
        asked_to_end: why the user wants the run to end after the round that goes on; empty: it goes on.

    Returns:
        The progress after the last round, which `stop.patience` or the user may have chosen (`Progress.ended`);
        `restore` goes back to the best one.
    """
    method, clients, server, config = federation.method, federation.clients, federation.server, run.config
    progress = resume(run, method, clients.sites, server)
    clients.take(progress)
    run.digests.begin(progress.round, progress.state)

    def due(round: int) -> bool:
        return bool(config.eval.every) and round % config.eval.every == 0

    def score() -> bool:
        return scoring is not None and _score(method, run, progress, scoring)

    def why_ended() -> str:
        """Why the run ends with the round that is done, before its last one; empty: it goes on."""
        if progress.round >= config.rounds:
            return ""
        if run.ended is not None and progress.round >= run.ended["round"]:
            return str(run.ended["why"])
        if config.stop.patience is not None and due(progress.round):
            lines = scores(run)
            if not lines and progress.round >= config.eval.every * config.stop.patience:
                raise RunError(UNSCORED.format(config.stop.patience))
            if why := stop_reason(lines, config.stop, run.continued):
                return why
        return asked_to_end()

    if progress.round:
        on_resume(progress.round + (progress.round < config.rounds and not why_ended()))
        prune(run, progress)  # what a kill between a checkpoint and the deletion of older ones has left
    else:
        on_begin()
        if scoring and scoring.base:
            log_base(run, config.eval.during, scoring.base)

    # What ends with a round that `eval.every` leaves out scores it all the same, but after its checkpoint: continued
    # with more rounds, it then goes on as if it had had them from the start.
    scored_before = progress.round > 0 and any(line["round"] == progress.round for line in scores(run))
    if progress.round and due(progress.round) and not scored_before:
        score()
    early = why_ended() if progress.round else ""
    if (early or progress.round == config.rounds) and not (due(progress.round) or scored_before):
        score()
    private = config.privacy.clip is not None
    if requested := server.clients or tuple(clients.sites):
        name, like = str(config.method["name"]), method.upload_like(method.broadcast(progress.state, requested[0]))
        if private and not config.privacy.by_example:
            check_upload(like)
        if config.privacy.secure:
            summing.check_upload(like, name)
        roles.check(name, method.sends, like)
    run.lap("before the rounds")
    while progress.round < config.rounds and not early:
        round = progress.round + 1
        watch, lr = Watch(), config.lr(round)
        signs.listener.get().round(round)
        progress.round = round
        earlier = len(progress.in_flight)
        record = clients.exchange(method, progress, lr, run, watch)
        progress.requested.update(run.digests.requested)
        came = {item.client: item.content.digest for item in progress.in_flight[earlier:]}
        uploads = arrivals(run, method, progress, record)
        if not (private or config.privacy.secure) and uploads:
            record["updates"] = compared(method, progress.state, uploads)
        if config.privacy.central:
            like = method.upload_like(method.broadcast(progress.state, server.clients[0]))
            uploads = noisy_mean(uploads, like, config, len(server.clients), federation.secret or run.secret, round)
        with watch("server"):
            step = method.server_update(server, progress.state, uploads)
            progress.state = _single(federation.runtime, server, round, lr, step)
            _check_finite(progress.state, run, round)
        work = federation.runtime.take_work()
        for why in server.unmoved:
            log_event(run, round, server.id, "no mean", why)
        if private:
            run.log({"kind": "privacy", "round": round, **clients.spent(config, round)})
        done = {"padding": rounded(work.padding), "tokens": work.tokens}
        done |= {"server_steps": len(server.losses)} if server.losses else {}
        run.log({"kind": "round", "round": round, "lr": lr, **record, **done})
        if report := method.report(progress.state):
            run.log({"kind": "server", "round": round, **report})
        improved = False
        if due(round):
            with watch("evaluate"):
                improved = score()
        scored = scoring is not None and due(round)
        held = memories(clients.sites, server, run.digests.requested)
        run.digests.round(round, came, held, progress.state, due=scored)
        try:
            on_trained()
        except BaseException:
            save(run, progress, clients.sites, server)
            raise
        early = why_ended()
        kept, last = config.checkpoint, round == config.rounds or bool(early)
        opened = config.privacy.secure and not clients.sites  # nodes do not open a round twice
        if improved or last or opened or round % kept.every == 0 or round in kept.keep_rounds:
            with watch("checkpoint"):
                save(run, progress, clients.sites, server)
        if last and not due(round):
            with watch("evaluate"):
                score()
            on_trained()
        passes: dict[str, Json] = {"passes": work.passes(), "why": work.why} if work.requested else {}
        signs.listener.get().round_ended()
        run.log_timing({"round": round, **watch.record(), **passes})
    run.lap()
    if early:
        end_early(run, progress, early)
    return progress


def log_base(run: Run, split: str, score_base: Callable[[str], Summary | None]) -> dict[str, Any] | None:
    """The score line of a split without any adapter, which is logged; None without that split."""
    with signs.part("testing the base"):
        summary = score_base(split)
    if summary is None:
        return None
    line = {"kind": "score", "round": 0, "split": split, **summary.as_json()}
    run.log(line)
    return line


def _score(method: Method, run: Run, progress: Progress, scoring: Scoring) -> bool:
    """Log the scores; whether they are the best so far of those among which the best is sought."""
    split = run.config.eval.during
    summary = scoring.evaluate(Messages(method, progress.state, scoring.who, run.config.transport), split)
    if summary is None:
        return False
    line = {"kind": "score", "round": progress.round, "split": split, **summary.as_json()}
    run.log(line)
    return progress.consider(line, run.config)


def _check_finite(state: Message, run: Run, round: int) -> None:
    """Refuse a server's state with a number that is not finite, before anybody is sent it and before it is saved.
    RunError: where in the state, which checkpoint is the newest without it, and what to do."""
    if where := infinite(state, "state"):
        kept = rounds_in(run.checkpoints.folder)
        newest = f"the checkpoint of round {kept[-1]} is whole" if kept else "there is no checkpoint yet"
        raise RunError(
            f"round {round}: the server's {where} holds NaN or infinite numbers, though every upload that it took was "
            f"finite and within its bounds, so the server's own step is at fault and the run ends here; {newest}. See "
            "the method's own settings (its step sizes, if it has some), then give the command again, with --fresh"
        )


def _single(runtime: Runtime, site: Site, round: int, lr: float, work: Coroutine[Any, Any, Message]) -> Message:
    site.begin(round, lr)
    (outcome,) = runtime.run({site.id: work}).values()
    if isinstance(outcome, ClientError):
        raise RunError(f"round {round}: the server's own training failed: {outcome}") from outcome
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
