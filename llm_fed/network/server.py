"""Runs a federation whose clients are on other machines: the round loop here, their work there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed import kinds, tasks
from llm_fed.basics import signs
from llm_fed.basics.errors import RunError, UserError, one_line
from llm_fed.bench import bases, taking_part
from llm_fed.bench.build import Experiment, prepare, structures
from llm_fed.bench.needed import needed_config
from llm_fed.eval import merges
from llm_fed.experiment import announce, splits, timing, unused
from llm_fed.experiment.baselines import line_of
from llm_fed.experiment.environment import same_environment
from llm_fed.experiment.finish import selected_round, spent_in, write_summary
from llm_fed.export import models
from llm_fed.federation import aggregation
from llm_fed.federation.clients import messages_for
from llm_fed.federation.loop import Federation, Scoring, federate
from llm_fed.federation.progress import Progress, restore
from llm_fed.kinds import Kind
from llm_fed.network import limits
from llm_fed.network.bundle import RUN_NAME
from llm_fed.network.clients import RemoteClients
from llm_fed.network.link import Link, Reply
from llm_fed.runs import extend
from llm_fed.runs.folder import Run, holds_results, log_event
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.settings.plugins import short
from llm_fed.state.wire import Message, WireError
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.record import Record


def train(
    config: Config,
    folder: Path,
    link: Link,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    base: Kind | None = None,
    name: str | None = None,
) -> dict[str, Any]:
    """Run a federation, or continue it, to its end; personal models and their scores are made by the clients.

    Args:
        folder: the run folder, here; it never holds a personal model.
        link: reaches the clients.
        base: the configured base, where it is loaded already.
        name: under which the clients keep their personal models (default: the folder's).

    Returns:
        The content of `summary.json`, as `run.train` does.

    Raises:
        UserError, RunError: see `Run`, `prepare`, `federate` and `RemoteClients`.
    """
    reporter = reporter or Reporter()
    limits.check(config)
    name = name or folder.resolve().name
    with reporter.working(), Run(folder, config, fresh, reporter.record) as run:
        done = run.summary()
        if done is not None and not done.get("unfinished"):
            reporter.note(f"{folder} is complete: {config.rounds} rounds; fresh=true starts again")
            return done
        if config.export.clients != "none" and not RUN_NAME.fullmatch(name):
            raise UserError(
                f"the run folder {folder} is named {name!r}, which nodes refuse as the name of a folder; give it a "
                "name of letters, digits and hyphens"
            )
        begins = fresh or not holds_results(folder)
        if begins:
            unused.check(run.config)
        rows = splits.known(folder, run.config, begins=begins)
        built = prepare(run.config, reporter, base=base, task=_own_data(run.config, rows.all), everybody=False)
        run.config = config = built.config
        if begins:
            built.base.check_names(config.adapter)
        if run.before is not None:
            for note in extend.notes(run.before, config, folder, built.method):
                reporter.note(note)
        for note in splits.notes(built, rows):
            reporter.note(note)
        run.begin()
        splits.remember(run, built.record, rows)
        same_environment(run, built, reporter)
        known = run.recall("network.json") or {"token": secrets.token_hex(8), "clients": [], "nodes": {}}
        known.setdefault("examples", {})
        # All nodes compute alike, and each keeps with the run which of its rows it trains on.
        link = _Marked(link, dtype=config.base.dtype, held_out=config.task.held_out, run=known["token"])
        secret = secrets.randbits(63)  # of noise and of sampling under privacy: another one after a crash
        asked = replace(config, eval=replace(config.eval, metric=built.metric))
        clients = RemoteClients(link, asked, known["token"], secret, reporter.note)
        with signs.part("waiting for the clients"):
            clients.gather(bases.identity(built.base), known["clients"], known["nodes"], known["examples"])
        models.check_names(config.export.clients, clients.names)
        if not built.scored and (unscored := [name for name in clients.names if name in clients.roster.unscored]):
            reporter.note_once(taking_part.line(taking_part.UNSCORED, unscored, len(clients.names)))
        told = {"clients": list(clients.names), "nodes": clients.roster.owners, "examples": clients.roster.examples}
        run.remember("network.json", known | told)
        built.server.clients, built.server.cohort = clients.names, clients.cohort_size
        built.server.structures = structures(config, built.method, built.base, clients.names)
        aggregation.check_cohort(config, clients.cohort_size)
        reporter.announce(announce.run_plan(built, reached=run.reached, names=clients.names).rows())
        if built.method.needs:
            return _merge(built, run, clients, link, reporter, name)
        federation = Federation(built.method, clients, built.server, built.runtime, noise_seed=secret)
        here = Scoring(built.scored, built.evaluate)  # where the server holds the test examples
        scoring = here if built.scored else Scoring(clients.names, clients.evaluate)
        with reporter.tracking(config, folder, timing.ahead(built)):
            progress = federate(federation, run, scoring, on_resume=reporter.resumed)
            progress = selected_round(built, run, progress, reporter)
            clients.take(progress)
            sent = {
                client: {"message": message, "given": {}}
                for client, message in messages_for(
                    built.method, progress.state, clients.names, config.transport.down
                ).items()
            }
            return _finish(built, run, clients, progress, sent, {}, name)


def _merge(
    built: Experiment, run: Run, clients: RemoteClients, link: Link, reporter: Reporter, name: str
) -> dict[str, Any]:
    """The whole run of a method that starts from the results of others."""
    config, method = built.config, built.method
    rounds: dict[str, int] = {}
    given: dict[str, dict[str, dict[str, Any]]] = {client: {} for client in clients.names}
    sent: dict[str, dict[str, Any]] = {client: {"message": None, "given": {}} for client in clients.names}
    for need in method.needs:
        folder, its_config = run.folder / "needs" / need, needed_config(config, need)
        reporter.note(f"{config.method['name']} starts from {need}: {folder}")
        summary = train(
            its_config, folder, _Marked(link, need=need), reporter=reporter, base=built.base,
            name=f"{name}-{short(need)}",
        )  # fmt: skip
        round = method.needed(need).round
        rounds[need] = summary["round"] if round is None else round
        with Run(folder, its_config) as its_run:
            its_run.begin()
            data = _own_data(its_config, splits.known(folder, its_config).all)
            its_built = prepare(its_config, reporter, base=built.base, task=data, everybody=False)
            try:
                progress = restore(its_run.checkpoints.load(rounds[need]), {}, its_built.server)
            except WireError as error:
                raise RunError(f"the checkpoint of round {rounds[need]} of {need} cannot be read: {error}") from error
            token = (its_run.recall("network.json") or {})["token"]
        answered = (progress.elsewhere or {"answered": {}})["answered"]
        down = config.transport.down
        for client, message in messages_for(its_built.method, progress.state, clients.names, down).items():
            sent[client]["given"][need] = message
            given[client][need] = {"run": token, "after": answered.get(client, 0)}
    run.rewind()
    progress = Progress(None)
    clients.take(progress)
    return _finish(built, run, clients, progress, sent, given, name, round=config.rounds, needs=rounds)


def _finish(
    built: Experiment,
    run: Run,
    clients: RemoteClients,
    progress: Progress,
    sent: Mapping[str, Message],
    given: Mapping[str, Mapping[str, Any]],
    name: str,
    round: int | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """What is done once at the end: at every client, and here."""
    round = round or progress.round
    record: dict[str, Any] = {"kind": "score", "round": round, "split": "test"}
    with signs.part(signs.FINISHING):
        summary, replies = clients.finish(sent, given, name, spent_in(run))
    if built.scored:
        messages = messages_for(built.method, progress.state, built.scored, built.config.transport.down)
        summary = built.evaluate(messages, "test")
    unfinished = [client for client, reply in replies.items() if reply.error]
    for client, reply in replies.items():
        if reply.error:
            again = "give the same command again, and it gets its personal model"
            log_event(run, round, client, "not finished", f"{reply.error}; {again}")
        elif reply.failed:
            log_event(run, round, client, "client failed", reply.failed)
        elif built.method.needs:
            try:
                recipe = reply.recipe
                merges.tabulate({client: recipe})
                merges.curves({client: recipe})
            except Exception as error:  # of any kind: whatever one client answers ends that answer alone
                log_event(run, round, client, "refused recipe", one_line(f"{type(error).__name__}: {error}"))
            else:
                run.log({**recipe, "kind": "merge", "client": client, "rounds": facts["needs"]})
    if len(unfinished) == len(replies):
        raise RunError("no client finished; give the same command again to retry")
    if summary:
        if not built.scored:
            facts |= _rules(built, run, replies)
        record |= summary.as_json()
        run.log(record)
    return write_summary(built, run, record, round, **facts, **({"unfinished": unfinished} if unfinished else {}))


def _rules(built: Experiment, run: Run, replies: Mapping[str, Reply]) -> dict[str, Any]:
    """The line of the rules that the clients have scored on their own examples, logged."""
    line = line_of(built.metric, {client: reply.rule for client, reply in replies.items() if reply.rule})
    if line:
        run.log(line)
    return {"rule": line} if line else {}


class _Marked:
    """A link whose messages say more: to which run they belong, and to that of which needed method; in which dtype to
    compute, and how rows are held out. What they say already stays."""

    def __init__(self, link: Link, **marks: str):
        self._link, self._marks = link, marks
        self.nodes, self.receive = link.nodes, link.receive

    def send(self, orders: Any, patience: float) -> list[str | None]:
        return self._link.send([(node, {**self._marks, **order}, content) for node, order, content in orders], patience)


def _own_data(config: Config, known: Record | None) -> TaskData:
    """The task as the server sees it: no client, and its own examples, where the configuration gives it some.

    Args:
        known: the rows that the run knows.
    """
    if config.task.server.examples == 0 and not config.task.server.test:
        labels = kinds.chosen(config).known_labels(config)
        return TaskData(config.task.name, tasks.find(config.task.name).metric, {}, labels)
    return replace(tasks.load(config.task, config.federation_seed, config.evaluation_seed, known), clients={})
