"""Runs a federation whose clients are on other machines: the round loop here, their work there."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed import kinds, tasks
from llm_fed.basics import signs
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.rng import Secret
from llm_fed.bench import bases, taking_part
from llm_fed.bench.build import Experiment, prepare
from llm_fed.bench.sites import structures
from llm_fed.experiment import announce, merging, run, splits
from llm_fed.experiment.ending import Ending
from llm_fed.experiment.finish import facts_of, spent_of, write_summary
from llm_fed.experiment.simulation import Simulation, Train
from llm_fed.export import models
from llm_fed.federation import aggregation
from llm_fed.federation.clients import Messages
from llm_fed.federation.loop import Federation, Scoring
from llm_fed.federation.progress import Progress, restore
from llm_fed.network import limits
from llm_fed.network.clients import RemoteClients, known_of
from llm_fed.network.link import RUN_NAME, Link
from llm_fed.network.summed import SummedClients
from llm_fed.network.watching import heard
from llm_fed.runs.folder import Run, log_event
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import Config
from llm_fed.settings.plugins import short
from llm_fed.state.wire import Message
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.record import Record


def train(
    config: Config,
    folder: Path,
    link: Link,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    finish: bool = False,
    goes_on: bool = False,
) -> dict[str, Any]:
    """Run a federation, or continue it, to its end, as `run.train` does; personal models and their scores are made by
    the clients. `folder`: the run folder, here; it never holds a personal model. `finish`: train no further round, and
    finish with those that the run has."""
    deployment = Deployment(link, folder.resolve().name)
    ending = Ending("finish=true" if finish else "")
    return run.train(config, folder, fresh=fresh, reporter=reporter, mode=deployment, ending=ending, goes_on=goes_on)


class Deployment(Simulation):
    """The server trains nothing but what it has examples of its own for. `name`: under which clients keep models."""

    fresh = "fresh=true"
    in_turn = False  # its clients may be in this process, and need their turn while it waits for them

    def __init__(self, link: Link, name: str):
        super().__init__()
        self._link, self._name = link, name
        self._secret: Secret  # of noise and of sampling under privacy
        self._clients: RemoteClients
        self._folders: dict[str, Path] = {}  # of a merge: those of the parents, by name

    def check(self, config: Config, folder: Path) -> None:
        limits.check(config)

    def reopens(self, run: Run, done: Mapping[str, Any]) -> bool:
        return bool(done.get("unfinished"))

    def opened(self, run: Run, reporter: Reporter) -> None:
        if run.config.export.clients != "none" and not RUN_NAME.fullmatch(self._name):
            raise UserError(
                f"the run folder {run.folder} is named {self._name!r}, which nodes refuse as the name of a folder; "
                "give it a name of letters, digits and hyphens"
            )

    def given(self, config: Config, known: Record | None) -> dict[str, Any]:
        return {"task": _own_data(config, known), "everybody": False}

    def ready(self, experiment: Experiment, run: Run, reporter: Reporter) -> Experiment:
        return experiment

    def begun(self, experiment: Experiment, run: Run, reporter: Reporter) -> None:
        """Waits for the clients."""
        config = experiment.config
        new: dict[str, Any] = {"token": secrets.token_hex(8), "clients": [], "nodes": {}, "examples": {}}
        known = run.recall("network.json") or new
        # Another one after a crash: a round that is done again has other uploads, and must not share their noise.
        self._secret = run.secret.of("a server", secrets.token_hex(16))
        # All nodes compute alike, and each keeps with the run which of its rows it trains on.
        marks = {"dtype": config.base.dtype, "run": known["token"]}
        requested = replace(config, eval=replace(config.eval, metric=experiment.metric))
        self._marked = _Marked(self._link, **marks)
        kind = SummedClients if config.privacy.secure else RemoteClients
        clients = self._clients = kind(self._marked, requested, known["token"], self._secret, reporter.note)
        with signs.part("waiting for the clients"):
            clients.gather(bases.identity(experiment.base), known)
        if not isinstance(config.export.clients, str):
            models.check_names(config.export.clients, clients.names)
        unscored = [name for name in clients.names if name in clients.roster.unscored]
        if unscored and not experiment.scored:
            reporter.note_once(taking_part.line(taking_part.UNSCORED, unscored, len(clients.names)))
        joined = {"clients": list(clients.names), "nodes": clients.roster.owners, "examples": clients.roster.examples}
        run.remember("network.json", known | joined)
        experiment.server = replace(
            experiment.server, clients=clients.names, cohort=clients.cohort_size,
            structures=structures(config, experiment.method, experiment.base, clients.names),
        )  # fmt: skip
        aggregation.check_cohort(config, clients.cohort_size)
        reporter.announce(announce.run_plan(experiment, reached=run.reached, names=clients.names).rows())

    def merge(self, experiment: Experiment, run: Run, reporter: Reporter, train: Train) -> dict[str, Any]:
        config, clients = experiment.config, self._clients
        rounds: dict[str, int] = {}
        given: dict[str, dict[str, dict[str, Json]]] = {client: {} for client in clients.names}
        sent: dict[str, dict[str, Message]] = {client: {"message": None, "given": {}} for client in clients.names}

        def first(its_config: Config, folder: Path) -> dict[str, Any]:
            parent = its_config.method["name"]
            mode = Deployment(_Marked(self._marked, need=parent), f"{self._name}-{short(parent)}")
            return train(its_config, folder, reporter=reporter, base=experiment.base, mode=mode)

        for parent, its_config, folder, chosen in merging.trained(experiment, run, first, reporter, {}):
            need, rounds[parent.name], self._folders[parent.name] = parent.name, chosen, folder
            with Run(folder, its_config) as its_run:
                its_run.begin()
                data = _own_data(its_config, splits.known(folder, its_config).all)
                its_built = prepare(its_config, reporter, base=experiment.base, task=data, everybody=False)
                progress = restore(its_run.checkpoints.load(chosen), {}, its_built.server)
                token = (its_run.recall("network.json") or {})["token"]
            answered, down = known_of(progress)["answered"], config.transport
            for client, message in Messages(its_built.method, progress.state, clients.names, down).items():
                sent[client]["given"][need] = message
                given[client][need] = {"run": token, "after": answered.get(client, 0)}
        run.rewind()
        progress = Progress(None)
        clients.take(progress)
        return self._end(experiment, run, progress, sent, given, rounds)

    def federation(self, experiment: Experiment) -> tuple[Federation, Scoring]:
        clients = self._clients
        federation = Federation(experiment.method, clients, experiment.server, experiment.runtime, self._secret)
        if experiment.scored:  # where the server holds the test examples
            return federation, Scoring(experiment.scored, experiment.evaluate)
        return federation, Scoring(clients.names, clients.evaluate)

    def finish(self, experiment: Experiment, run: Run, progress: Progress) -> dict[str, Any]:
        clients, down = self._clients, experiment.config.transport
        clients.take(progress)
        messages = Messages(experiment.method, progress.state, clients.names, down)
        sent = {client: {"message": message, "given": {}} for client, message in messages.items()}
        return self._end(experiment, run, progress, sent, {})

    def _end(
        self,
        experiment: Experiment,
        run: Run,
        progress: Progress,
        sent: Mapping[str, Message],
        given: Mapping[str, Mapping[str, Mapping[str, Json]]],
        merged: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """The end, at every client and here. `merged`: by parent of a merge the round whose models are merged."""
        round, facts = progress.round, facts_of(progress)
        if merged:
            round, facts = experiment.config.rounds, {"needs": merged, **merging.ended_in(self._folders)}
        record: dict[str, Any] = {"kind": "score", "round": round, "split": "test"}
        with signs.part(signs.FINISHING):
            last = facts["ended"]["round"] if "ended" in facts else None
            summary, replies = self._clients.finish(sent, given, self._name, spent_of(run.records()), last)
        if experiment.scored:
            messages = Messages(experiment.method, progress.state, experiment.scored, experiment.config.transport)
            summary = experiment.evaluate(messages, "test")
        unfinished = [client for client, reply in replies.items() if reply.error]
        for client, reply in replies.items():
            if reply.error:
                why = f"{reply.error}; give the same command again, and it gets its personal model"
                log_event(run, round, client, "not finished", why)
            elif reply.failed:
                log_event(run, round, client, "client failed", reply.failed)
            elif merged:
                merging.log_recipe(run, round, client, reply.recipe, merged)
        if len(unfinished) == len(replies):
            raise RunError("no client finished; give the same command again to retry")
        if summary:
            if not experiment.scored:
                facts |= heard(experiment, run, summary.clients, replies)
            record |= summary.as_json()
            run.log(record)
        facts |= {"unfinished": unfinished} if unfinished else {}
        return write_summary(experiment, run, record, round, **facts)


class _Marked:
    """A link whose messages say more: to which run they belong, for which parent of a merge, and in which dtype to
    compute. What they say already stays."""

    def __init__(self, link: Link, **marks: str):
        self._link, self._marks = link, marks
        self.nodes, self.receive = link.nodes, link.receive

    def send(self, orders: Sequence[tuple[int, Mapping[str, Json], bytes]], patience: float) -> list[str | None]:
        return self._link.send([(node, {**self._marks, **order}, content) for node, order, content in orders], patience)


def _own_data(config: Config, known: Record | None) -> TaskData:
    """The task as the server sees it: no client, and its own examples, where the configuration gives it some."""
    if config.task.server.examples == 0 and not config.task.server.test:
        row, labels = tasks.find(config.task.name), kinds.chosen(config).known_labels(config)
        return TaskData(config.task.name, row.metric, {}, labels, kind=row.kind)
    return replace(tasks.load(config.task, config.federation_seed, config.evaluation_seed, known), clients={})
