"""Builds what a configuration names - base, task, clients, method, schedule, runtime - and runs it from start to
export."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.console import Console
from transformers.utils import logging as transformers_logging

from llm_fed import announce, export, extend, methods, parties, privacy, signs, start, tasks
from llm_fed.card import model_card
from llm_fed.clients import LocalClients, finish, messages_for
from llm_fed.config import Config
from llm_fed.configfile import as_dict
from llm_fed.errors import ClientError, RunError, UserError, require
from llm_fed.eval.clients import Personal, evaluate
from llm_fed.eval.report import write_report
from llm_fed.eval.scores import METRICS, Summary
from llm_fed.federation import federate, log_base
from llm_fed.language import LanguageEngine
from llm_fed.lora import check_names
from llm_fed.method import Method
from llm_fed.models.images import ImageBase
from llm_fed.models.loading import Base, settle_dtype
from llm_fed.needed import check_rounds, needed_config, states_of_run
from llm_fed.progress import Progress, restore
from llm_fed.prompt import prompt_of
from llm_fed.rng import generator
from llm_fed.run import Run, holds_results, look, read_records
from llm_fed.runtime.accelerate import Build, Shared, Spread, serve_orders
from llm_fed.runtime.launch import choose_device, other_ranks
from llm_fed.runtime.local import Engine, LocalRuntime, choose_clients_per_pass
from llm_fed.schedule import Delayed, Poisson, Schedule, most_asked
from llm_fed.site import Site
from llm_fed.state import State
from llm_fed.structure import structure_of
from llm_fed.tracking import Reporter, check_trackers
from llm_fed.vision import VisionEngine
from llm_fed.wire import Message, WireError


@dataclass
class Experiment:
    """Everything that a run needs, in memory."""

    config: Config
    base: Base | ImageBase
    metric: str
    method: Method
    clients: dict[str, Site]
    server: Site
    schedule: Schedule
    runtime: LocalRuntime

    @property
    def scored(self) -> dict[str, Site]:
        """Who is scored: every client, or the server alone where it holds the test examples."""
        return parties.scored(self.clients, self.server)

    def evaluate(self, messages: Mapping[str, Message], split: str) -> Summary | None:
        """The score of everybody who is scored, under the model that the method makes of what this one is sent."""
        return self.score(lambda site: self.method.personalize(site, messages[site.id]), split)

    def score(self, personal: Personal, split: str) -> Summary | None:
        """The score of everybody who is scored, under the model that `personal` gives it."""
        limit = self.config.eval.limit
        return evaluate(personal, self.scored, self.runtime, split=split, metric=self.metric, limit=limit)

    def score_base(self, split: str) -> Summary | None:
        """The scores without training: everybody under one plain adapter whose B is zero, which adds nothing."""
        structure = structure_of(self.config.adapter, self.base.head)
        draw = partial(self.base.draw, structure)
        bare = {id: replace(site, structure=structure, draw=draw) for id, site in self.scored.items()}
        state = draw(generator(self.config.seed, "base"))

        async def personal(site: Site) -> State:
            return state

        return evaluate(personal, bare, self.runtime, split=split, metric=self.metric, limit=self.config.eval.limit)

    def lr(self, round: int) -> float:
        """Of a round, see `extend.lr`."""
        return extend.lr(self.config, round)

    def shared(self) -> Shared:
        """What all ranks of a launch build alike."""
        model = self.base.model if isinstance(self.base, Base) else None
        return Shared.of(self.runtime.engine, [*self.clients.values(), self.server], model)


def prepare(
    config: Config,
    reporter: Reporter,
    *,
    base: Base | ImageBase | None = None,
    task: tasks.common.TaskData | None = None,
) -> Experiment:
    """Load and build everything, the cheap and fallible parts first; the experiment's configuration says in which dtype
    it computes, also where the given one says `auto`.

    Args:
        base, task: instead of what the configuration names; a client of such a task may come without training examples.

    Raises:
        UserError: anything that the configuration names is not there or does not fit.
    """
    method = methods.build(config.method)
    check_rounds(method, config)
    check_trackers(config.track)
    privacy.check(config, method)
    with signs.part(f"reading the data of {config.task.name}"):
        task = task or tasks.load(config.task, config.seed)
    metric = config.eval.metric or task.metric
    require("eval.metric", metric, METRICS)
    parties.check_kinds(config, task, method, metric)
    device = str(base.device) if base else choose_device(config.device)
    settled, said = settle_dtype(config.base, device)
    if said:
        config = replace(config, base=settled)
        reporter.note(said)
    with signs.part(f"loading the base {config.base.name}"):
        base = base or parties.load(config, task, device)
    with signs.part("preparing the clients' examples"):
        clients, server = parties.build(config, task, base, method, metric, reporter)
    delay = config.delay
    schedule: Schedule
    if privacy.central(config.privacy):
        schedule = Poisson(tuple(clients), config.participation, config.seed)
    else:
        schedule = Delayed(
            tuple(clients), config.participation, config.seed,
            sigma=delay.sigma, per=delay.per, drop_out=delay.drop_out,
        )  # fmt: skip
    server.cohort = schedule.cohort_size
    if start.place(config):
        reporter.note(start.give(config, method, [*clients.values(), server], base))
        method.init(server)  # a method that cannot start there says so now
    per_pass = choose_clients_per_pass(config.clients_per_pass, schedule.cohort_size, server.initial(), base.device)
    engine: Engine
    if isinstance(base, ImageBase):
        engine = VisionEngine(base, config.local)
    else:
        engine = LanguageEngine(base, config.local, config.eval)
    runtime = LocalRuntime(engine, per_pass)
    return Experiment(config, base, metric, method, clients, server, schedule, runtime)


def train(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    needed: Mapping[str, Path] | None = None,
    base: Base | ImageBase | None = None,
) -> dict[str, Any]:
    """Run a federation, or continue it, to its end: adapters, test scores and report lie in `folder` afterwards.

    Args:
        needed: by name of a method that this one needs, the folder of that run, which is begun or continued as
            necessary (default: `folder/needs/<name>`).
        base: the configured base, where it is loaded already.

    Returns:
        The content of `summary.json`: the test scores, and which round they belong to.

    Raises:
        UserError, RunError: see `Run`, `prepare` and `federate`.
    """
    reporter = reporter or Reporter()
    ranks = other_ranks()
    if ranks and config.base.device_map:
        raise UserError(
            f"base.device_map=auto gives one process all GPUs, but there are {ranks.size} processes; start one, or "
            "leave it out"
        )
    with reporter.working(), Run(folder, config, fresh, reporter.record) as run:
        done = run.summary()
        if done is not None and not lacks_exports(run):
            reporter.note(f"{folder} is complete: {config.rounds} rounds; --fresh starts again")
            return done
        if config.base.dtype == "auto" and run.config.base.dtype != "auto":
            reporter.note(f"computing in {run.config.base.dtype}, as when this run began")
        _check_place(run.config, folder)
        experiment = prepare(run.config, reporter, base=base)
        run.config = config = experiment.config
        if fresh or not holds_results(folder):  # what was begun before this was checked goes on as it is
            check_names(experiment.base.model, config.adapter)
        export.check_names(config.export.clients, experiment.scored)
        if ranks:
            experiment.runtime.engine = Spread(ranks, config, experiment.shared())
        sites, origin = [*experiment.clients.values(), experiment.server], start.place(config)
        if origin and run.continues:
            start.check(run, sites, origin)
        if run.before is not None:
            for note in extend.notes(run.before, config, folder, experiment.method):
                reporter.note(note)
        reporter.announce(announce.run_plan(experiment, reached=run.reached).rows())
        run.begin()
        if origin:
            start.remember(run, sites, origin)
        if done is not None:
            reporter.note(f"{folder} is complete; export.clients has changed, so its end is done again")
            (folder / "summary.json").unlink()
        same_environment(run, experiment, reporter)
        if experiment.method.needs:
            return _merge(experiment, run, needed or {}, reporter)
        with reporter.tracking(config, folder, announce.ahead(experiment)):
            progress = federate(
                experiment.method, LocalClients(experiment.clients, experiment.schedule, experiment.runtime),
                experiment.server, experiment.runtime, run, experiment.evaluate,
                rounds=config.rounds, lr=experiment.lr, scored=experiment.scored, on_resume=reporter.resumed,
                most_asked=partial(most_asked, experiment.schedule),
                score_base=experiment.score_base if config.eval.base else None,
            )  # fmt: skip
            return _conclude(experiment, run, progress, reporter)


def dry_run(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    base: Base | ImageBase | None = None,
) -> announce.RunPlan:
    """What `train` would do with the same arguments, with what it would cost; nothing is trained or written.

    Raises:
        UserError, RunError: as `train` before its first round.
    """
    reporter = reporter or Reporter()
    with reporter.working():
        reached, complete = look(folder, config, fresh)
        built = prepare(config, reporter, base=base)
        parents = [
            dry_run(
                needed_config(config, need), folder / "needs" / need, fresh=fresh, reporter=reporter, base=built.base
            )
            for need in built.method.needs
        ]
        plan = announce.run_plan(built, reached=reached, complete=complete)
        with signs.part("measuring the memory of a training step"):
            return announce.with_costs(plan, built, folder, parents)


def _check_place(config: Config, folder: Path) -> None:
    """Refuse a run that would start from its own folder, which --fresh deletes.

    Raises:
        UserError: it would.
    """
    origin = start.place(config)
    if origin and folder.resolve() in (Path(origin).resolve(), *Path(origin).resolve().parents):
        raise UserError(f"adapter.start={origin} lies in the folder of this run itself; give another --out")


def _merge(experiment: Experiment, run: Run, needed: Mapping[str, Path], reporter: Reporter) -> dict[str, Any]:
    """The whole run of a method that starts from the results of others."""
    config, method, name = experiment.config, experiment.method, experiment.config.method["name"]
    rounds, given, seen = {}, {}, set()
    for need in method.needs:
        folder, its_config = needed.get(need, run.folder / "needs" / need), needed_config(config, need)
        reporter.note(f"{name} starts from {need}: {folder}")
        summary = train(its_config, folder, reporter=reporter, needed=needed, base=experiment.base)
        round = method.needed_round(need)
        rounds[need] = summary["round"] if round is None else round
        given[need] = states_of_run(folder, round, its_config, experiment.base, experiment.clients, experiment.runtime)
        seen |= export.seen(read_records(folder / "metrics.jsonl"), rounds[need])
    run.rewind(0)
    with signs.part("merging at the clients"):
        merge(experiment, given, config.rounds + 1, config.local.lr)
    for id, site in experiment.clients.items():
        recipe = method.recipe(site)
        run.log({"kind": "merge", "client": id, "rounds": rounds, **recipe})
        if "note" in recipe:
            reporter.note(f"{id}: {recipe['note']}")
    return _deliver(experiment, run, dict.fromkeys(experiment.clients), config.rounds, seen, needs=rounds)


def merge(experiment: Experiment, given: Mapping[str, Mapping[str, Message]], round: int, lr: float) -> None:
    """`Method.finish` at every client with what it is `given` (by needed method and client).

    Raises:
        UserError, RunError: a client cannot be merged.
    """
    for id, site in experiment.clients.items():
        site.given = {need: states[id] for need, states in given.items()}
        site.begin(round, lr)
    work = {id: experiment.method.finish(site, None) for id, site in experiment.clients.items()}
    for outcome in experiment.runtime.run(work).values():
        if isinstance(outcome, ClientError):
            raise RunError(str(outcome)) from outcome
        if isinstance(outcome, Exception):
            raise outcome


def _conclude(experiment: Experiment, run: Run, progress: Progress, reporter: Reporter) -> dict[str, Any]:
    """Local finishing, test scores, exported adapters and the report, from the best round or the last."""
    config = experiment.config
    progress = selected(experiment, run, progress, reporter)
    with signs.part("finishing at the clients"):
        messages = finish(
            experiment.method, experiment.clients, experiment.runtime, run, progress,
            round=config.rounds + 1, lr=config.local.lr,
        )  # fmt: skip
    others = experiment.scored.keys() - messages.keys()
    messages |= messages_for(experiment.method, progress.state, others, config.transport.down)
    return _deliver(experiment, run, messages, progress.round, export.seen(run.records(), progress.round))


def selected(experiment: Experiment, run: Run, progress: Progress, reporter: Reporter) -> Progress:
    """The progress after the round that is tested: the best one, or the last."""
    config = experiment.config
    if config.eval.select == "best" and progress.best_round not in (0, progress.round):
        try:
            progress = restore(run.checkpoints.load(progress.best_round), experiment.clients, experiment.server)
        except WireError as error:
            raise RunError(
                f"the best round's checkpoint cannot be read: {error}; eval.select=last uses the last"
            ) from error
    reporter.note(f"testing round {progress.round} of {config.rounds}")
    return progress


def lacks_exports(run: Run) -> bool:
    """Whether `export.clients` has changed since a run was finished, and asks for more than the folder holds.

    Raises:
        UserError: it does, but the checkpoints are gone, from which the end could be done again.
    """
    asked = run.config.export.clients
    before, now = (run.saved or {}).get("export"), as_dict(run.config)["export"]
    if before in (None, now):
        return False
    if isinstance(asked, str):
        lacks = asked == "all" or (asked == "seen" and before != {"clients": "all"})
    else:
        lacks = not all((run.folder / "adapters" / id).is_dir() for id in asked)
    needs = methods.build(run.config.method).needs  # what they keep, this run does not
    if lacks and not needs and not any((run.folder / "checkpoints").glob("round-*")):
        raise UserError(
            f"{run.folder} has no checkpoints any more, from which more personal models could be exported, as "
            "export.clients asks; leave it out, or give --fresh to train again"
        )
    return lacks


def _deliver(
    experiment: Experiment,
    run: Run,
    messages: Mapping[str, Message],
    round: int,
    seen: Collection[str],
    **facts: Any,
) -> dict[str, Any]:
    """Test scores, exported adapters, the report, and last the summary, with further `facts`.

    Args:
        seen: clients of which an answer had arrived by this round.
    """
    with signs.part("test"):
        if experiment.config.eval.base and (base := log_base(run, "test", experiment.score_base)):
            facts["base"] = base
        summary = experiment.evaluate(messages, "test")
    record = {"kind": "score", "round": round, "split": "test"} | (summary.as_json() if summary else {})
    if summary:
        run.log(record)
    server = experiment.scored.keys() - experiment.clients.keys()  # which has one model for all, where it is scored
    exported = export.chosen(run.config.export.clients, experiment.scored, {*seen, *server})
    for path in (run.folder / "adapters").glob("*"):
        if path.is_dir() and path.name not in exported:  # of an earlier end of this run
            shutil.rmtree(path)
    personal = experiment.runtime.run(
        {id: experiment.method.personalize(experiment.scored[id], messages[id]) for id in exported}
    )
    config_text = (run.folder / "config.yaml").read_text()
    spent = spent_in(run)
    for id, state in personal.items():
        if isinstance(state, Exception):
            raise state
        score = summary.clients.get(id) if summary else None
        hand_out(experiment, experiment.scored[id], state, score, run.folder / "adapters" / id, config_text, spent)
    return conclude(experiment, run, record, round, **facts)


def spent_in(run: Run) -> dict[str, Any] | None:
    """What the run spent of its clients' privacy; None where it had none."""
    line = next((line for line in reversed(run.records()) if line["kind"] == "privacy"), None)
    return {key: line[key] for key in ("epsilon", "delta", "where")} if line else None


def hand_out(
    experiment: Experiment,
    site: Site,
    state: Message,
    score: float | None,
    folder: Path,
    config_text: str,
    spent: Mapping[str, Any] | None = None,
) -> None:
    """Write a site's personal model and its card to `folder`; `spent` is what the run spent of its clients' privacy."""
    config, method = experiment.config, experiment.method
    own = bool(site.memory) or type(method).personalize is not Method.personalize
    prompt = prompt_of(experiment.base, config)
    card = model_card(
        client=site.id, base=config.base.name, method=config.method["name"], paper=experiment.method.paper,
        metrics={} if score is None else {experiment.metric: score},
        config=config_text, recipe=experiment.method.recipe(site),
        kind=export.kind(site.structure, experiment.base), labels=site.num_labels,
        models=export.models(site.structure, experiment.base),
        privacy=privacy.statement(config.privacy, spent, own) if spent else "",
        prompt=prompt, dtype=str(experiment.base.dtype).removeprefix("torch."),
    )  # fmt: skip
    export.write(folder, state, site.structure, experiment.base, card, prompt)


def conclude(experiment: Experiment, run: Run, record: Mapping[str, Any], round: int, **facts: Any) -> dict[str, Any]:
    """The report, and last the summary, with the test scores in `record` and further `facts`."""
    config = experiment.config
    result = {"round": round, "rounds": config.rounds, "method": config.method["name"], "scores": record}
    result |= facts
    if spent := spent_in(run):
        result["privacy"] = spent
    run.mark()
    write_report(run.folder)
    run.remember("summary.json", result)  # the last file: a folder that has it is complete
    return result


def serve() -> None:
    """What the ranks above 0 of a launch do in the place of a command: their share of what rank 0 runs, until it
    ends."""
    quiet()
    serve_orders(builder())


def builder() -> Build:
    """How a rank above 0 makes, of rank 0's configurations one after another, what it shares with it."""
    bases, silent = parties.Bases(), Reporter(Console(quiet=True))

    def build(config: Config) -> Shared:
        return prepare(config, silent, base=bases.of(config)).shared()

    return build


def same_environment(run: Run, experiment: Experiment, reporter: Reporter) -> None:
    """Record what decides the bits of a result beside the configuration; a continued run takes over what it can."""
    now = {
        "clients_per_pass": experiment.runtime.clients_per_pass,
        "threads": torch.get_num_threads(),
        "processes": PartialState().num_processes,
        "device": str(experiment.base.device),
        "dtype": experiment.config.base.dtype,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }
    before = run.recall("environment.json")
    if before is None:
        run.remember("environment.json", now)
        return
    experiment.runtime.clients_per_pass = before["clients_per_pass"]
    before = {"processes": 1, "dtype": now["dtype"]} | before  # of a run begun before these were recorded
    changed = [
        f"{key} {before[key]} -> {now[key]}" for key in now if key != "clients_per_pass" and before[key] != now[key]
    ]
    if changed:
        reporter.note(f"this run began elsewhere ({'; '.join(changed)}): results may differ in the last bits")


def quiet() -> None:
    """Keep transformers' progress bars and notices out of the run's own output, unless the user set its verbosity."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing optional kernels
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
