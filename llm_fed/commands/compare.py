"""Comparisons: the rows of one configuration file times seeds, each run trained once, and one table of them all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from llm_fed.basics import turns
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import write_file
from llm_fed.bench.bases import Bases
from llm_fed.bench.build import prepare
from llm_fed.bench.costs import Parameters, count_parameters
from llm_fed.commands.comparison import ComparisonPlan, Job
from llm_fed.commands.own import OwnRows
from llm_fed.commands.section import NO_OBJECTS, in_row, read_section
from llm_fed.eval.forest import plot_verdict
from llm_fed.eval.plots import Band, Point, plot_bands, plot_methods, plot_tradeoff
from llm_fed.eval.report.comparison import Draw, write_comparison
from llm_fed.eval.tables import MAX_CLIENTS, ComparisonRow, Table, to_text
from llm_fed.experiment import splits, unused
from llm_fed.experiment.baselines import Baselines
from llm_fed.experiment.ending import check_scored
from llm_fed.runs.folder import holds_results
from llm_fed.runs.forecast import duration
from llm_fed.runs.reading import scores_by_round
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import plugins
from llm_fed.settings.configfile import as_dict
from llm_fed.settings.paths import public_text
from llm_fed.tasks import natural

A_MINUTE = 60.0  # seconds; of a shorter comparison nobody needs to know the rest


def load_rows(path: str | Path) -> dict[str, list[str]]:
    """The rows in a configuration's `compare` section, label -> `key=value` words; none without such a section.

    Raises:
        UserError: the file cannot be read, or the section is not as it should be.
    """
    return read_section(path).rows


def compare(
    path: Path,
    words: Sequence[str] = (),
    *,
    chosen: Sequence[str] = (),
    seeds: Sequence[int] = (),
    out: Path,
    reporter: Reporter | None = None,
    own: OwnRows = NO_OBJECTS,
) -> Table:
    """Run, or continue, every row with every seed; `out` holds the runs and, after each, the table so far, at the end
    also as a page.

    Args:
        words: `key=value` words laid over the file and over every row.
        chosen: labels of rows, or names of methods as plain rows (default: all rows of the file).
        seeds: instead of those of the file (default: the configuration's own seed).
        own: objects in the place of names, which must be at hand.

    Returns:
        The table; a run that failed has its reason there, and the others are not lost.

    Raises:
        UserError: something is wrong with a row's configuration; nothing has been trained yet.
        RunError: another process writes to one of the runs, or the table cannot be written.
    """
    reporter, out = reporter or Reporter(), out.absolute()
    with reporter.working(), turns.taken(reporter.note):
        plan = ComparisonPlan(path, words, chosen, seeds, out, own)
        for note in [*plan.notes, *([own.in_words] if own.in_words else [])]:
            reporter.note(note)
        bases = Bases(reuse=True)
        table = _empty_table(plan, bases)
    with plugins.allowing([name for job in plan.jobs() for name in plugins.named_in(as_dict(job.config)).values()]):
        return _trained(plan, table, bases, reporter, out)


def _trained(plan: ComparisonPlan, table: Table, bases: Bases, reporter: Reporter, out: Path) -> Table:
    """The table after every run of the plan that is still open."""
    baselines = Baselines()
    for job in plan.jobs():
        if isinstance(job.outcome, dict):
            baselines.remember(job.config, job.outcome, job.folder)
    open_jobs, began = [job for job in plan.jobs() if not job.outcome], time.monotonic()
    for done, job in enumerate(open_jobs):
        left = (len(open_jobs) - done) * (time.monotonic() - began) / done if done else 0.0
        expected = f"; about {duration(left)} left if all take as long as those before" if left > A_MINUTE else ""
        if not done and len(open_jobs) > 1:
            expected = "; the time below is that of one run"
        reporter.note(f"{job.folder.name}: run {done + 1} of {len(open_jobs)}{expected}")
        job.train(reporter, bases.of(job.config), baselines)
        if isinstance(job.outcome, str):
            reporter.note(f"{job.folder.name} failed: {job.outcome}")
        _write(_fill(table, plan), out)
    for row in table.rows:
        for seed in plan.seeds:
            if plan.cells[row.label, seed].compare_with_local():
                row.results.pop(seed, None)
    table.notes += _changed(plan)
    _write(_fill(table, plan), out)
    drawn = _drawn(table, out, plan.file.eval.during)
    table.pictures = [draw(out / f"{name}.png") for name, draw in drawn.items()]
    write_comparison(table, out / "table.html", drawn)
    return table


def _empty_table(plan: ComparisonPlan, bases: Bases) -> Table:
    """The table before any score. It builds each row's experiment, which finds mistakes that lie in the base, the
    task or the method, and counts parameters."""
    metrics: dict[str, str] = {}  # by label
    counted: dict[int, Parameters] = {}  # several rows may start from the same runs

    def count(job: Job, label: str) -> Parameters:
        if id(job) not in counted:
            counted[id(job)] = build(job, label)
        return counted[id(job)]

    def build(job: Job, label: str) -> Parameters:
        begins = not holds_results(job.folder)
        if begins:
            unused.check(job.config)
        built = prepare(job.config, Reporter(Console(quiet=True)), base=bases.of(job.config))
        check_scored(built)
        if begins:
            built.base.check_names(job.config.adapter)
        metrics[label] = built.metric
        parents = [count(parent, label) for parent in job.parents.values()]
        return count_parameters(built.method, built.server, built.trainers, built.base.layout, parents)

    rows = []
    for label, words in plan.rows.items():
        job = plan.cells[label, plan.seeds[0]]
        with in_row(label):
            rows.append(
                ComparisonRow(
                    label, [public_text(word) for word in words], job.config.method["name"], count(job, label)
                )
            )
    if len(set(metrics.values())) > 1:
        scored = ", ".join(f"{label} by {metric}" for label, metric in metrics.items())
        raise UserError(f"all rows need the same metric, but it differs ({scored}); set eval.metric")
    base = bases.of(plan.file)
    structure: Any = base.structure(plan.file.adapter)
    layout = base.layout(structure)
    table = Table(
        metrics[rows[0].label], plan.seeds, layout.size, rows, natural=natural(plan.file.task), budget=plan.budget
    )
    if plan.file.adapter and base.head:
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
            task = repr((job.config.task, job.config.evaluation_seed))
            other = first.setdefault(task, job)
            if isinstance(job.outcome, dict) and splits.tested_alike(job.folder, other.folder) is False:
                return [
                    f"With seed {seed}, {other.shown} and {job.shown} were tested on other examples, as the data "
                    "changed in between, so they cannot be compared; another --out runs all of them on the data as "
                    "they are."
                ]
    return []


def _write(table: Table, out: Path) -> None:
    for name, text in to_text(table).items():
        try:
            out.mkdir(parents=True, exist_ok=True)
            write_file(out / name, text.encode())
        except OSError as error:
            raise RunError(f"cannot write {out / name}: {error.strerror or error}") from error


def _drawn(table: Table, out: Path, split: str) -> dict[str, Draw]:
    """What draws each picture: the score by round (Feddle, Figure 5), on the `split` that is scored during training;
    against bytes up (POTARA, Figure 2) and against parameters on the server (FedMerge, Figure 5); of a few clients also
    each one's score under every row; from three draws on, the verdict on each pair."""
    drawn: dict[str, Draw] = {}
    if judged := table.verdict.judged:
        drawn["verdict"] = partial(plot_verdict, columns=judged[:2])
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
            score, traffic = row.summary("average"), row.traffic
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
        seeds = [scores_by_round(out / result.folder, split) for result in row.results.values()]
        rounds = sorted(set.intersection(*map(set, seeds))) if seeds else []
        if len(rounds) > 1:
            scores = [[found[round] for found in seeds] for round in rounds]
            bounds = [min(each) for each in scores], [max(each) for each in scores]
            curves[row.label] = (rounds, [fmean(each) for each in scores], *bounds)
    return curves
