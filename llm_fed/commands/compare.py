"""Comparisons: the rows of one configuration file times seeds, each run trained once, and one table of them all."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console

from llm_fed.basics import turns
from llm_fed.basics.errors import UserError
from llm_fed.basics.files import write_result
from llm_fed.bench.bases import Bases
from llm_fed.bench.costs import Parameters, count_parameters
from llm_fed.commands.comparison import ComparisonPlan
from llm_fed.commands.own import OwnObjects
from llm_fed.commands.section import Rows, in_row
from llm_fed.engine.memory import weights
from llm_fed.eval.plots import Band, Point, plot_bands, plot_methods, plot_tradeoff, plot_verdict
from llm_fed.eval.report.comparison import Draw, write_comparison
from llm_fed.eval.tables import MAX_CLIENTS, ComparisonRow, Table, to_text
from llm_fed.experiment import on_ray, splits
from llm_fed.experiment.baselines import Baselines, shared_by
from llm_fed.experiment.job import Job, spent_together
from llm_fed.experiment.run import checked
from llm_fed.experiment.side_by_side import LOGS, Process, SideBySide, Start, shares
from llm_fed.models.lora import Lora
from llm_fed.runs.reading import scores_in_training
from llm_fed.runs.records import read_records
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime import launch
from llm_fed.settings import plugins
from llm_fed.settings.configfile import as_dict
from llm_fed.settings.paths import public_text
from llm_fed.tasks import natural

RAY: Final = "ray"  # as a number of jobs: as many as Ray's machines can train
Jobs = int | str  # a number, or RAY
Shares = Sequence[Mapping[str, str]]  # variables of each process
HEAD = ("local", "pooled")  # methods of the first rows, between which the others are read


def compare(rows: Rows, out: Path, *, reporter: Reporter | None = None, jobs: Jobs = 1) -> Table:
    """Run, or continue, every row with every seed; `out` holds the runs and, after each, the table so far, at the end
    also as a page. Returns the table; a run that failed has its reason there, and the others are not lost. UserError:
    something is wrong with a row's configuration, or so many jobs do not fit into memory; nothing has been trained yet.
    RunError: another process writes to one of the runs, or the table cannot be written. `jobs`: how many runs are
    trained at a time; from two on each in a process of its own. `RAY`: on Ray's machines."""
    reporter, out = reporter or Reporter(), out.absolute()
    plan, table, bases, parts = _prepare(rows, out, reporter, jobs)
    named = (plugins.named_in(as_dict(job.config)) for job in plan.jobs())
    with plugins.allowing([name for names in named for name in names.values()]):
        with closing(_trainings(plan, bases, parts, reporter, out)) as trainings:
            for job, log in trainings:
                if isinstance(job.outcome, str):
                    reporter.note(f"{job.folder.name} failed: {job.outcome}{log}")
                _write(_fill(table, plan), out)
        table.notes += filter(None, [*_changed(plan), spent_together(plan.jobs())])
        _write(_fill(table, plan), out)
        drawn = _drawn(table, out, plan.file.eval.during)
        table.pictures = [draw(out / f"{name}.png") for name, draw in drawn.items()]
        write_comparison(table, out / "table.html", drawn)
    return table


def dry_run(rows: Rows, out: Path, *, jobs: Jobs = 1) -> tuple[list[Job], Jobs]:
    """What `compare` would do with the same arguments: its runs, and how many at a time. Nothing is trained or written.
    UserError, RunError: as `compare` before its first run."""
    plan, _, _, parts = _prepare(rows, out.absolute(), Reporter(), jobs)
    return [*plan.jobs()], len(parts) or RAY


def _prepare(rows: Rows, out: Path, reporter: Reporter, jobs: Jobs) -> tuple[ComparisonPlan, Table, Bases, Shares]:
    """A comparison that has been checked and is still to be trained, and the variables of as many processes as train at
    a time; of this one alone none, and where Ray's machines train there is no process."""
    check_jobs(jobs, rows.own)
    with reporter.working(), turns.taken(reporter.note):
        plan = ComparisonPlan(rows, out)
        for note in [*plan.notes, *([rows.own.note] if rows.own.given else [])]:
            reporter.note(note)
        bases = Bases(reuse=True)
        table, waiting = _empty_table(plan, bases), sum(not job.outcome for job in plan.jobs())
        if isinstance(jobs, str):
            return plan, table, bases, [] if waiting else [{}]
        if (processes := min(jobs, waiting)) < 2:
            return plan, table, bases, [{}]
        base, divided = bases.of(plan.file), any(job.config.base.device_map for job in plan.jobs())
        return plan, table, bases, shares(jobs, processes, weights([base.model]), base.device, divided)


def check_jobs(jobs: Jobs, own: OwnObjects) -> None:
    """Refuse a number of jobs that cannot be. UserError: it is no number from 1 on, or several processes would need
    what only this one has; or Ray is missing."""
    if jobs == RAY:
        on_ray.check_installed()
    elif type(jobs) is not int or jobs < 1:
        raise UserError(f"--jobs is {jobs!r}; it takes a whole number from 1 on, or {RAY}")
    if jobs != 1 and own.given:
        raise UserError(
            f"jobs={jobs} trains in other processes, which cannot look up objects of this program; leave it out, or "
            "give names, such as module:Name, in the place of objects"
        )
    if jobs != 1 and (size := launch.processes()) > 1:
        raise UserError(
            f"--jobs {jobs} starts processes of its own, but this is one of {size} of a launch, which share each run; "
            "leave --jobs out, or start the command without a launcher"
        )


def _trainings(
    plan: ComparisonPlan, bases: Bases, parts: Shares, reporter: Reporter, out: Path
) -> Generator[tuple[Job, str], None, None]:
    """Each open run when it has ended, with words on where its log is."""
    jobs = [*plan.jobs()]
    waiting, numbers = [job for job in jobs if not job.outcome], count(1)

    def begins(job: Job) -> None:
        reporter.note(f"{job.folder.name}: run {next(numbers)} of {len(waiting)}")

    if len(parts) == 1:
        baselines = Baselines()
        for job in jobs:
            if isinstance(job.outcome, dict):
                baselines.remember(job.config, job.outcome, job.folder)
        # Runs on the same data one after another, and of these local first, with which the others are compared.
        groups = list(dict.fromkeys(shared_by(job.config, "") for job in jobs))
        waiting.sort(key=lambda job: (groups.index(shared_by(job.config, "")), not job.is_local))
        for job in waiting:
            begins(job)
            job.train(reporter, bases.of(job.config), baselines)
            yield job, ""
        return
    bases.give_back()
    with ExitStack() as stack:
        starts: list[Start] = [partial(Process.begin, share) for share in parts]
        if starts:
            reporter.note(f"{len(starts)} runs at a time, each in a process of its own with a log in {out / LOGS}")
        else:
            starts = [stack.enter_context(on_ray.cluster(len(waiting), plan.file.device, reporter.note))] * len(waiting)
        runs = SideBySide(jobs, starts, out, begins)
        for job in stack.enter_context(closing(runs.trained())):
            log = runs.log(job)
            yield job, f"; its log is {log}" if log.exists() else ""


def _empty_table(plan: ComparisonPlan, bases: Bases) -> Table:
    """The table before any score. It builds each row's experiment, which finds mistakes that lie in the base, the
    task or the method, and counts parameters."""
    metrics: dict[str, str] = {}  # by label
    counted: dict[Job, Parameters] = {}  # several rows may start from the same runs

    def parameters(job: Job, label: str) -> Parameters:
        if job in counted:
            return counted[job]
        built = checked(job.config, Reporter(Console(quiet=True)), not job.begun, base=bases.of(job.config))
        metrics[label] = built.metric
        parents = [parameters(parent, label) for parent in job.parents.values()]
        counted[job] = count_parameters(built.method, built.server, built.trainers, built.base.layout, parents)
        return counted[job]

    rows = []
    for label, words in plan.rows.items():
        job = plan.cells[label, plan.seeds[0]]
        said = [public_text(word) for word in words]
        with in_row(label):
            rows.append(ComparisonRow(label, said, job.config.method["name"], parameters(job, label)))
    rows.sort(key=lambda row: HEAD.index(row.method) if row.method in HEAD else len(HEAD))
    if len(set(metrics.values())) > 1:
        scored = ", ".join(f"{label} by {metric}" for label, metric in metrics.items())
        raise UserError(f"all rows need the same metric, but it differs ({scored}); set eval.metric")
    base = bases.of(plan.file)
    structure = base.structure(plan.file.adapter)
    layout = base.layout(structure)
    table = Table(next(iter(metrics.values())), plan.seeds, layout.size, rows, natural=natural(plan.file.task))
    if isinstance(structure, Lora) and base.head:
        head = layout.size - base.layout(replace(structure, whole=())).size
        table.notes.append(f"Of an adapter's parameters {head:,} are its head's, which is trained whole.")
    if any(job.parents for job in plan.cells.values()):
        table.notes.append(
            "A method that merges the adapters of other runs is charged their bytes up to the round that it uses of "
            "each (trained further, they have sent more), and their parameters on the server and in messages."
        )
    return table


def _fill(table: Table, plan: ComparisonPlan) -> Table:
    """Put what is known by now into the table."""
    for row in table.rows:
        for seed in plan.seeds:
            job = plan.cells[row.label, seed]
            if isinstance(job.outcome, dict):
                if seed not in row.results:
                    row.results[seed] = job.result()
            elif job.outcome:
                row.failures[seed] = public_text(job.outcome)
    for seed in plan.seeds:
        if uncounted := table.uncounted_at(seed):
            for row in table.rows:
                if seed in row.results:
                    row.results[seed] = plan.cells[row.label, seed].result(uncounted)
    return table


def _changed(plan: ComparisonPlan) -> list[str]:
    """A note where rows of one seed were tested on other examples, as the data changed between their runs."""
    for seed in plan.seeds:
        first: dict[str, Job] = {}  # by what says which rows are tested
        for label in plan.rows:
            job = plan.cells[label, seed]
            other = first.setdefault(repr((job.config.task, job.config.evaluation_seed)), job)
            if isinstance(job.outcome, dict) and splits.tested_alike(job.folder, other.folder) is False:
                return [
                    f"With seed {seed}, {other.shown} and {job.shown} were tested on other examples, as the data "
                    "changed in between, so they cannot be compared; another --out runs all of them on the data as "
                    "they are."
                ]
    return []


def _write(table: Table, out: Path) -> None:
    for name, text in to_text(table).items():
        write_result(out / name, text.encode())


def _drawn(table: Table, out: Path, split: str) -> dict[str, Draw]:
    """What draws each picture: the score by round (Feddle, Figure 5), on the `split` that is scored during training;
    against bytes up (POTARA, Figure 2) and against parameters on the server (FedMerge, Figure 5); of a few clients also
    each one's score under every row; from three draws on, the verdict on each pair."""
    drawn: dict[str, Draw] = {}
    if table.verdict.column.known:
        drawn["verdict"] = partial(plot_verdict, column=table.verdict.column)
    if 1 < len(table.clients) <= MAX_CLIENTS and (scores := table.by_client):
        drawn["score_by_client"] = partial(plot_methods, scores=scores, metric=table.metric)
    if curves := _curves(table, out, split):
        score = f"{table.metric}, {split}"
        drawn["score_by_round"] = partial(plot_bands, curves=curves, xlabel="round", ylabel=score)
    for name, cost, unit in (
        ("score_by_bytes", "up per client over the run", "B"),
        ("score_by_parameters", "parameters on the server, in adapters", "×"),
    ):
        series: dict[str, list[Point]] = {}
        for row in table.rows:
            score, traffic = row.over_seeds(lambda run: run.average), row.traffic
            if score and traffic:
                x = traffic.up if unit == "B" else row.parameters.server / table.adapter
                series.setdefault(row.method, []).append((row.label, x, score.mean, score.std))
        if series:
            labels = {points[0][0] if len(points) == 1 else method: points for method, points in series.items()}
            drawn[name] = partial(plot_tradeoff, series=labels, cost=cost, unit=unit, metric=table.metric)
    return drawn


def _curves(table: Table, out: Path, split: str) -> dict[str, Band]:
    """By row: the rounds that all its seeds have scored, and the mean, lowest and highest of the seeds' scores. Rows
    with fewer than two such rounds have no curve."""
    curves: dict[str, Band] = {}
    for row in table.rows:
        seeds = []
        for result in row.results.values():
            known = scores_in_training(read_records(out / result.folder / "metrics.jsonl"), split)
            seeds.append({round: line["mean"] for round, line in known.items() if round and "mean" in line})
        rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
        if len(rounds) > 1:
            scores = [[found[round] for found in seeds] for round in rounds]
            bounds = [min(each) for each in scores], [max(each) for each in scores]
            curves[row.label] = (rounds, [fmean(each) for each in scores], *bounds)
    return curves
