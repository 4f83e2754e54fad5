"""Runs an experiment from start to export: a federation, or the merging of runs that others began."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging as transformers_logging

from llm_fed.basics import signs, turns
from llm_fed.bench import taking_part
from llm_fed.bench.bases import Bases
from llm_fed.bench.build import Experiment, prepare
from llm_fed.bench.parents import config_of
from llm_fed.experiment import announce, splits, unused
from llm_fed.experiment.ending import Ending, check_begun, check_scored, describe
from llm_fed.experiment.environment import same_environment
from llm_fed.experiment.finish import selected_round
from llm_fed.experiment.simulation import Simulation
from llm_fed.federation.aggregation import check_cohort
from llm_fed.federation.loop import federate
from llm_fed.kinds import Kind
from llm_fed.method.merge import Merge
from llm_fed.runs import extend, inputs
from llm_fed.runs.folder import Run, holds_results, look
from llm_fed.runs.inputs import Contents
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.accelerate import Build, Shared, serve_orders
from llm_fed.runtime.launch import connect, other_ranks
from llm_fed.settings.config import Config
from llm_fed.tasks.record import Record


def train(
    config: Config,
    folder: Path,
    *,
    fresh: bool = False,
    reporter: Reporter | None = None,
    base: Kind | None = None,
    contents: Contents | None = None,
    mode: Simulation | None = None,
    ending: Ending | None = None,
    goes_on: bool = False,
) -> dict[str, Any]:
    """Run a federation or a merge, or continue it, to its end. Returns the content of `summary.json`: the test scores,
    and which round they belong to. UserError, RunError: see `Run`, `prepare`, `federate` and the mode.

    Args:
        base: the configured base, where it is loaded already.
        contents: of the files that the configuration names, where they may have been read already.
        mode: where the clients are (default: a `Simulation`, after which adapters, test scores and report lie in
            `folder`).
        ending: how the user may end it before its last round.
        goes_on: whether a run that has ended so, or by `stop.patience`, goes on.
    """
    reporter, mode, ending = reporter or Reporter(), mode or Simulation(), ending or Ending()
    mode.check(config, folder)
    with (
        reporter.working(),
        Run(folder, config, fresh, reporter.record, reporter.note, contents) as run,
        turns.taken(reporter.note) if mode.in_turn else nullcontext(),
    ):
        if goes_on:
            run.go_on()
        elif ending.why and run.summary() is None:
            check_begun(run, ending.why)
        done = run.summary()
        if done is not None and not mode.reopens(run, done):
            inputs.check_finished(run.folder, run.config, run.contents)
            reporter.note(f"{folder} is complete: {describe(done, mode.fresh)}")
            return done
        if config.base.dtype == "auto" and run.config.base.dtype != "auto":
            reporter.note(f"computing in {run.config.base.dtype}, as when this run began")
        mode.opened(run, reporter)
        # What was begun before these were checked goes on as it is.
        begins = not run.continues or not holds_results(folder)
        rows = splits.known(folder, run.config, begins=begins, parents=mode.parents, given=mode.known)
        secret = run.secret if run.config.privacy.clip is not None else None
        experiment = checked(run.config, reporter, begins, base=base, secret=secret, **mode.given(run.config, rows.all))
        run.config = config = replace(experiment.config, rounds=run.config.rounds)
        if run.reached:
            extend.check_together(folder, run.reached, experiment.config.rounds, config.rounds)
        if secret is not None:
            splits.check_noise(run, experiment, rows)
        if run.before is not None:
            for line in extend.notes(run.before, config, folder, experiment.method):
                reporter.note(line)
        for line in splits.notes(experiment, rows) if rows.own else ():
            reporter.note(line)
        experiment = mode.ready(experiment, run, reporter)
        run.begin()
        run.config = experiment.config
        splits.remember(run, experiment.record, rows)
        same_environment(run, experiment, reporter)
        mode.begun(experiment, run, reporter)
        if isinstance(experiment.method, Merge):
            return mode.merge(experiment, run, reporter, partial(train, ending=ending, goes_on=goes_on))
        with reporter.tracking(run.config, folder):
            federation, scoring = mode.federation(experiment)
            log_reading = partial(splits.log_reading, run, experiment)
            hooks = reporter.callbacks
            with ending.listening(reporter.note):
                progress = federate(
                    federation, run, scoring, on_resume=reporter.resumed, on_begin=log_reading,
                    asked_to_end=lambda: ending.why or hooks.stopped_by, on_trained=hooks.round_ended,
                )  # fmt: skip
            if progress.ended:
                reporter.ended_early(progress.round, progress.ended.why)
            return mode.finish(experiment, run, selected_round(experiment, run, progress, reporter))


def checked(config: Config, reporter: Reporter, begins: bool, **given: Any) -> Experiment:
    """What `prepare` makes of these arguments, of a run that `begins` without a setting that would change nothing.
    UserError: see `prepare`, `unused.check` and `check_scored`."""
    if begins:
        unused.check(config)
    built = prepare(config, reporter, **given)
    if config.stop.patience is not None:
        check_scored(built)
    if begins:
        built.base.check_names(config.adapter)
    return built


def dry_run(
    config: Config, folder: Path, *, fresh: bool = False, reporter: Reporter | None = None, base: Kind | None = None
) -> announce.RunPlan:
    """What `train` would do with the same arguments, with what it would cost; nothing is trained or written. UserError,
    RunError: as `train` before its first round."""
    reporter = reporter or Reporter()
    with reporter.working(), turns.taken(reporter.note):
        reached, complete, config = look(folder, config, fresh, reporter.note)
        begins = fresh or not holds_results(folder)
        rows = splits.known(folder, config, begins=begins)
        built = checked(config, reporter, begins, base=base, known=rows.all)
        extend.check_together(folder, reached, built.config.rounds, config.rounds)
        for note in splits.notes(built, rows):
            reporter.note(note)
        check_cohort(config, built.schedule.cohort_size)
        for note in taking_part.notes(built):
            reporter.note_once(note)
        plan = announce.run_plan(built, reached=reached, complete=complete, work=True)
        first = [
            dry_run(
                config_of(parent.name, config), folder / "needs" / parent.name, fresh=fresh, reporter=reporter,
                base=built.base,
            )
            for parent in built.method.parents
        ]  # fmt: skip
        with signs.part("measuring the memory of a training step"):
            return announce.with_costs(plan, built, folder, first)


def join_launch() -> AbstractContextManager[Any] | None:
    """At rank 0 of a launch the other ranks, who work for it within. A rank above 0 does its share of what rank 0 runs
    until that ends, and returns None. UserError, RunError: the processes do not find each other; rank 0 ended with an
    error."""
    if not (channel := connect()) or not channel.rank:
        return other_ranks() or nullcontext()
    quiet()
    logging.getLogger("llm_fed").setLevel(logging.ERROR)  # rank 0 warns of the same
    serve_orders(builder())
    return None


def builder() -> Build:
    """How a rank above 0 makes, of rank 0's configurations one after another, what it shares with it."""
    bases, silent = Bases(reuse=True), Reporter(Console(quiet=True))

    def build(config: Config, known: Mapping[str, Any] | None) -> Shared:
        rows = None if known is None else Record.from_json(known)
        return prepare(config, silent, base=bases.of(config), known=rows).shared()

    return build


def quiet() -> None:
    """Keep transformers' progress bars and notices out of the run's own output, unless the user set its verbosity."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of missing optional kernels
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
