"""Simulation: the steps of a run that depend on where its clients are, for clients in this process, or in those of one
launch. `llm_fed/network/server.py` has those for clients on other machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from llm_fed.basics import launchers, signs
from llm_fed.basics.errors import UserError
from llm_fed.bench import start, taking_part
from llm_fed.bench.build import Experiment
from llm_fed.experiment import announce, merging
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.finish import finish_and_deliver
from llm_fed.export import models
from llm_fed.federation.aggregation import check_cohort
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, Scoring
from llm_fed.federation.progress import Progress
from llm_fed.method.site import Site
from llm_fed.runs import inputs
from llm_fed.runs.folder import Run
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.launch import other_ranks
from llm_fed.settings.config import Config
from llm_fed.settings.configfile import as_dict
from llm_fed.tasks.record import Record

Train = Callable[..., dict[str, Any]]  # `run.train`


@dataclass
class Simulation:
    """The steps of `run.train` that depend on where the clients are, in their order. All may raise UserError and
    RunError.

    Args:
        parents: of a merge, by the name of a parent its folder; that run is begun or continued as necessary (default:
            `needs/<name>` in the run's own).
        known: rows that keep the split which they have in a run for which this one is trained.
        baselines: what other runs have scored that this one need not score again.
    """

    parents: Mapping[str, Path] = field(default_factory=dict)
    known: Record | None = None
    baselines: Baselines = field(default_factory=Baselines)
    fresh: ClassVar[str] = "--fresh"  # how the user asks for a run that starts again
    in_turn: ClassVar[bool] = True  # whether no other thread loads, trains or answers meanwhile

    def check(self, config: Config, folder: Path) -> None:
        """Refuse what cannot be done, before the folder is looked at."""
        if (ranks := other_ranks()) and config.base.device_map:
            raise UserError(
                f"base.device_map=auto gives one process all GPUs, but there are {ranks.size} processes; start one, or "
                "leave it out"
            )

    def reopens(self, run: Run, done: Mapping[str, Any]) -> bool:
        """Whether a run with this summary is still to be finished."""
        return lacks_exports(run)

    def opened(self, run: Run, reporter: Reporter) -> None:
        """Before anything is loaded."""
        origin = run.config.start
        if origin and run.folder.resolve() in (Path(origin).resolve(), *Path(origin).resolve().parents):
            raise UserError(f"adapter.start={origin} lies in the folder of this run itself; give another --out")
        if run.moved:
            reporter.note(f"{' and '.join(run.moved)}: the same files as when this run began, under another path")

    def given(self, config: Config, known: Record | None) -> dict[str, Any]:
        """Of the arguments of `build.prepare` those that say which data are here. `known`: the rows that the run
        knows."""
        return {"known": known}

    def ready(self, experiment: Experiment, run: Run, reporter: Reporter) -> Experiment:
        """The last checks before the run takes its folder over."""
        check_cohort(experiment.config, experiment.schedule.cohort_size)
        if not isinstance(named := experiment.config.export.clients, str):
            models.check_names(named, experiment.scored)
        if run.continues:
            with signs.part("reading the files of data and base"):
                inputs.check_base(run.folder, as_dict(run.config)["base"], inputs.read(run.folder), run.contents)
        for line in taking_part.notes(experiment):
            reporter.note_once(line)
        if ranks := other_ranks():
            experiment = experiment.spread(ranks)
        if (origin := experiment.config.start) and run.continues:
            start.check(run, _sites(experiment), origin)
        reporter.announce(announce.run_plan(experiment, reached=run.reached).rows())
        for line in launchers.notes():
            reporter.note_once(line)
        return experiment

    def begun(self, experiment: Experiment, run: Run, reporter: Reporter) -> None:
        """After it has."""
        with signs.part("reading the files of data and base"):
            run.remember(inputs.FILE, run.contents.of(run.config))
        if origin := experiment.config.start:
            start.remember(run, _sites(experiment), origin)
        if run.summary() is not None:
            reporter.note(f"{run.folder} is complete; export.clients has changed, so its end is done again")
            run.forget("summary.json")

    def merge(self, experiment: Experiment, run: Run, reporter: Reporter, train: Train) -> dict[str, Any]:
        """The whole of a merge; its summary."""
        mode = Simulation({}, experiment.record, self.baselines)
        first = partial(train, reporter=reporter, base=experiment.base, contents=run.contents, mode=mode)
        return merging.merge_runs(experiment, run, first, reporter, self.baselines, self.parents)

    def federation(self, experiment: Experiment) -> tuple[Federation, Scoring]:
        """Who takes part in the rounds, and how they are scored."""
        clients = LocalClients(experiment.clients, experiment.schedule, experiment.runtime)
        first = experiment.config.eval.base is True and experiment.base.knows
        base_scores = partial(self.baselines.first, experiment) if first else None
        return (
            Federation(experiment.method, clients, experiment.server, experiment.runtime),
            Scoring(experiment.scored, experiment.evaluate, base_scores),
        )

    def finish(self, experiment: Experiment, run: Run, progress: Progress) -> dict[str, Any]:
        """Everything after the last round, from the progress that is tested; the summary."""
        return finish_and_deliver(experiment, run, progress, self.baselines)


def _sites(experiment: Experiment) -> list[Site]:
    return [*experiment.clients.values(), experiment.server]


def lacks_exports(run: Run) -> bool:
    """Whether `export.clients` has changed since a run was finished, and asks for more than the folder holds.
    UserError: it does, but the checkpoints are gone, from which the end could be done again."""
    requested = run.config.export.clients
    before, now = (run.saved or {}).get("export"), as_dict(run.config)["export"]
    if before in (None, now):
        return False
    if isinstance(requested, str):
        lacks = requested == "all" or (requested == "seen" and before != {"clients": "all"})
    else:
        lacks = not all((run.folder / "adapters" / id).is_dir() for id in requested)
    done = run.summary() or {}  # of a merge it names the parents, which keep the checkpoints
    if lacks and "needs" not in done and not any((run.folder / "checkpoints").glob("round-*")):
        raise UserError(
            f"{run.folder} has no checkpoints any more, so the other personal models that export.clients asks for "
            "cannot be exported; leave it out, or give --fresh to train again"
        )
    return lacks
