"""Runs an experiment from start to export: a federation, or the merging of runs that others began."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

from llm_fed import methods
from llm_fed.basics import launchers, signs, turns, waits
from llm_fed.basics.errors import ClientError, RunError, UserError
from llm_fed.bench import start, taking_part
from llm_fed.bench.bases import Bases
from llm_fed.bench.build import Experiment, prepare
from llm_fed.bench.needed import needed_config, states_of_run
from llm_fed.experiment import announce, splits, timing, unused
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.environment import same_environment
from llm_fed.experiment.finish import deliver, finish_and_deliver
from llm_fed.export import models
from llm_fed.federation.aggregation import check_cohort
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, Scoring, federate
from llm_fed.kinds import Kind
from llm_fed.runs import extend
from llm_fed.runs.folder import BAD_ROWS, Run, holds_results, log_event, look
from llm_fed.runs.records import read_records, time_of_day
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.accelerate import Build, Shared, serve_orders
from llm_fed.runtime.launch import other_ranks
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict
from llm_fed.settings.contents import Contents
from llm_fed.state.wire import Message
from llm_fed.tasks.record import Record


def train(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    needed: Mapping[str, Path] | None = None,
    base: Kind | None = None,
    known: Record | None = None,
    contents: Contents | None = None,
    baselines: Baselines | None = None,
) -> dict[str, Any]:
    """Run a federation, or continue it, to its end: adapters, test scores and report lie in `folder` afterwards.

    Args:
        needed: by name of a method that this one needs, the folder of that run, which is begun or continued as
            necessary (default: `folder/needs/<name>`).
        base: the configured base, where it is loaded already.
        known: rows that keep the split which they have in a run for which this one is trained.
        contents: of the files that the configuration names, where they may have been read already.
        baselines: what other runs have scored that this one need not score again.

    Returns:
        The content of `summary.json`: the test scores, and which round they belong to.

    Raises:
        UserError, RunError: see `Run`, `prepare` and `federate`.
    """
    reporter, baselines = reporter or Reporter(), baselines or Baselines()
    ranks = other_ranks()
    if ranks and config.base.device_map:
        raise UserError(
            f"base.device_map=auto gives one process all GPUs, but there are {ranks.size} processes; start one, or "
            "leave it out"
        )
    with (
        reporter.working(),
        Run(folder, config, fresh, reporter.record, reporter.note, contents) as run,
        turns.taken(reporter.note),
    ):
        if run.left:  # before anything is loaded, which may be what it died of
            reporter.note(run.left.end())
        done = run.summary()
        if done is not None and not lacks_exports(run):
            run.forget_left()
            reporter.note(f"{folder} is complete: {config.rounds} rounds; --fresh starts again")
            return done
        if config.base.dtype == "auto" and run.config.base.dtype != "auto":
            reporter.note(f"computing in {run.config.base.dtype}, as when this run began")
        _check_place(run.config, folder)
        if run.moved:
            reporter.note(f"{' and '.join(run.moved)}: the same files as when this run began, under another path")
        run.contents.ahead(run.config)
        begins = fresh or not holds_results(folder)  # what was begun before these were checked goes on as it is
        if begins:
            unused.check(run.config)
        rows = splits.known(folder, run.config, begins=begins, needed=needed, given=known)
        experiment = prepare(run.config, reporter, base=base, known=rows.all)
        check_cohort(config, experiment.schedule.cohort_size)
        run.config = config = experiment.config
        if begins:
            experiment.base.check_names(config.adapter)
        models.check_names(config.export.clients, experiment.scored)
        with signs.part("reading the files of data and base"):
            run.check_base()
        for line in taking_part.notes(experiment):
            reporter.note_once(line)
        if ranks:
            experiment = experiment.spread(ranks)
        sites, origin = [*experiment.clients.values(), experiment.server], start.place(config)
        if origin and run.continues:
            start.check(run, sites, origin)
        if run.before is not None:
            for line in extend.notes(run.before, config, folder, experiment.method):
                reporter.note(line)
        for line in splits.notes(experiment, rows):
            reporter.note(line)
        reporter.announce(announce.run_plan(experiment, reached=run.reached).rows())
        for line in launchers.notes():
            reporter.note_once(line)
        run.begin()
        splits.remember(run, experiment.record, rows)
        with signs.part("reading the files of data and base"):
            run.remember_inputs()
        if origin:
            start.remember(run, sites, origin)
        if done is not None:
            reporter.note(f"{folder} is complete; export.clients has changed, so its end is done again")
            run.forget("summary.json")
        same_environment(run, experiment, reporter)
        if experiment.method.needs:
            return _merge(experiment, run, needed or {}, reporter, baselines)
        plan = timing.ahead(experiment, baselines)
        if reporter.heard:
            plan = timing.with_forecast(experiment, plan, run.reached)
            reporter.expect(plan.in_words(run.reached))
        with reporter.tracking(config, run.folder, plan):
            clients = LocalClients(experiment.clients, experiment.schedule, experiment.runtime)
            federation = Federation(experiment.method, clients, experiment.server, experiment.runtime)
            base_scores = experiment.score_base if config.eval.base is True else None
            scoring = Scoring(experiment.scored, experiment.evaluate, base_scores)
            progress = federate(
                federation, run, scoring, on_resume=reporter.resumed, on_begin=partial(log_reading, run, experiment)
            )
            return finish_and_deliver(experiment, run, progress, reporter, baselines)


def dry_run(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    base: Kind | None = None,
) -> announce.RunPlan:
    """What `train` would do with the same arguments, with what it would cost; nothing is trained or written.

    Raises:
        UserError, RunError: as `train` before its first round.
    """
    reporter = reporter or Reporter()
    with reporter.working(), turns.taken(reporter.note):
        reached, complete, config = look(folder, config, fresh, reporter.note)
        begins = fresh or not holds_results(folder)
        if begins:
            unused.check(config)
        rows = splits.known(folder, config, begins=begins)
        built = prepare(config, reporter, base=base, known=rows.all)
        for note in splits.notes(built, rows):
            reporter.note(note)
        check_cohort(config, built.schedule.cohort_size)
        for note in taking_part.notes(built):
            reporter.note_once(note)
        parents = [
            dry_run(
                needed_config(config, need), folder / "needs" / need, fresh=fresh, reporter=reporter, base=built.base
            )
            for need in built.method.needs
        ]
        plan = announce.run_plan(built, reached=reached, complete=complete)
        if not complete and not parents:
            plan = replace(plan, time=timing.with_forecast(built, timing.ahead(built), reached).in_words(reached))
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


def _merge(
    experiment: Experiment, run: Run, needed: Mapping[str, Path], reporter: Reporter, baselines: Baselines
) -> dict[str, Any]:
    """The whole run of a method that starts from the results of others."""
    config, method, name = experiment.config, experiment.method, experiment.config.method["name"]
    rounds, given, seen = {}, {}, set()
    for need in method.needs:
        folder, its_config = needed.get(need, run.folder / "needs" / need), needed_config(config, need)
        reporter.note(f"{name} starts from {need}: {folder}")
        summary = train(
            its_config, folder, reporter=reporter, needed=needed, base=experiment.base, known=experiment.record,
            contents=run.contents, baselines=baselines,
        )  # fmt: skip
        chosen = method.needed(need).round
        rounds[need] = summary["round"] if chosen is None else chosen
        given[need] = states_of_run(folder, chosen, its_config, experiment.base, experiment.clients, experiment.runtime)
        seen |= models.seen(read_records(folder / "metrics.jsonl"), rounds[need])
    run.rewind()
    run.lap()  # the runs that it needs have folders of their own
    log_reading(run, experiment)
    for words in run.changes:
        log_event(run, config.rounds, "", "data changed", words)
    began = time.perf_counter()
    with signs.part("merging at the clients"):
        merge(experiment, given, config.rounds + 1, config.local.lr)
    seconds = round(time.perf_counter() - began, 4)
    run.log_timing({"round": config.rounds, "seconds": seconds, "parts": {"merge": seconds}, "ended": time_of_day()})
    run.lap()
    for id, site in experiment.clients.items():
        recipe = method.recipe(site)
        run.log({"kind": "merge", "client": id, "rounds": rounds, **recipe})
        if "note" in recipe:
            reporter.note(f"{id}: {recipe['note']}")
    return deliver(experiment, run, dict.fromkeys(experiment.clients), config.rounds, seen, baselines, needs=rounds)


def log_reading(run: Run, experiment: Experiment) -> None:
    """Lines of metrics.jsonl for what became of the user's files, and a file with every row that was left out."""
    reading = experiment.reading
    for event in reading.events() if reading else ():
        run.log({"kind": "event", "round": 0, "client": experiment.server.id, **event})
    if reading and reading.skipped:
        run.write_lines(BAD_ROWS, reading.skipped_lines())


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
            f"{run.folder} has no checkpoints any more, so the other personal models that export.clients asks for "
            "cannot be exported; leave it out, or give --fresh to train again"
        )
    return lacks


def serve() -> None:
    """What the ranks above 0 of a launch do in the place of a command: their share of what rank 0 runs, until it
    ends."""
    quiet()
    logging.getLogger("llm_fed").setLevel(logging.ERROR)  # rank 0 warns of the same
    serve_orders(builder())


def builder() -> Build:
    """How a rank above 0 makes, of rank 0's configurations one after another, what it shares with it."""
    bases, silent = Bases(), Reporter(Console(quiet=True))

    def build(config: Config, known: Mapping[str, Any] | None) -> Shared:
        rows = None if known is None else Record.from_json(known)
        return prepare(config, silent, base=bases.of(config), known=rows).shared()

    return build


def quiet() -> None:
    """Keep transformers' progress bars and notices out of the run's own output, unless the user set its verbosity, and
    name the locks of other packages for which this process waits."""
    waits.name_them()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing optional kernels
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
