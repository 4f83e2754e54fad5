"""Commands that train: run, quickstart and compare."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from llm_fed.basics.errors import RunError, UserError
from llm_fed.cli.printing import (
    Allow,
    ConfigFile,
    Json,
    Settings,
    beside_baselines,
    out,
    print_examples,
    print_result,
    print_scores,
    print_warnings,
    program_name,
)
from llm_fed.cli.program import app

if TYPE_CHECKING:
    from llm_fed.eval.tables import Table
    from llm_fed.eval.variance import Drawn
    from llm_fed.eval.verdict import Verdict
    from llm_fed.experiment.job import Job


@app.command(rich_help_panel="Train and compare")
def run(
    config: ConfigFile,
    settings: Settings = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="The run folder (default: runs/<config>-<method>-seed<n>).")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete an earlier run in the folder, and start from round 1.")
    ] = False,
    start: Annotated[
        Path | None,
        typer.Option("--from", help="Initialise from the adapters of a finished run or of a folder (adapter.start)."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Train nothing: show the plan, the traffic, and the memory it needs.")
    ] = False,
    show: Annotated[
        int | None,
        typer.Option(min=1, help="With --dry-run: print the first N examples of each client, with what is trained."),
    ] = None,
    finish: Annotated[
        bool,
        typer.Option("--finish", help="Train no further round: finish with those that the run has (scores, adapters)."),
    ] = False,
    goes_on: Annotated[
        bool, typer.Option("--continue", help="Let a run go on that has ended before its last round.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a federation. The same command continues an interrupted run, and extends a finished one with rounds=N.
    Ctrl-C once ends it after the round, with scores and adapters; twice leaves it to be continued."""
    from llm_fed.commands import api

    steering = {"--finish": finish, "--continue": goes_on, "--fresh": fresh, "--dry-run": dry_run}
    requested = [option for option, given in steering.items() if given]
    if len(requested) > 1 and (finish or goes_on):
        raise UserError(f"{requested[0]} and {requested[1]} do not go together; leave one of them out")
    if show and not dry_run:
        raise UserError("--show prints examples instead of training; give --dry-run, too")
    resolved = api.resolve(config, settings or [], out_dir, start)
    folder = out_dir or api.default_folder(config, resolved)
    if (finish or goes_on) and not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} holds no run, and {requested[0]} is for one that has begun; leave it out to train")
    from llm_fed.experiment import run as experiment  # takes seconds, so mistakes are named first
    from llm_fed.experiment.ending import Ending

    if show:
        print_examples(resolved, folder, show, fresh=fresh, as_json=as_json)
        return
    if dry_run:
        plan = experiment.dry_run(resolved, folder, fresh=fresh)
        print_result(asdict(plan), plan.for_terminal(folder), as_json)
        return
    ending = Ending("--finish" if finish else "", by_key=True)
    result = experiment.train(resolved, folder, fresh=fresh, ending=ending, goes_on=goes_on)
    if as_json:
        print(json.dumps(result))
        return
    print_scores(beside_baselines({str(result["method"]): result}))
    print_warnings(result)
    if ended := result.get("ended"):
        out.print(f"ended after round {ended['round']} of {result['rounds']}: {ended['why']}; --continue goes on")
    out.print(f"adapters, metrics and report.html are in {folder}")


@app.command(rich_help_panel="Train and compare")
def quickstart(
    out_dir: Annotated[Path, typer.Option("--out", help="The folder for the runs.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of the data, the adapters and the training.")] = 0,
) -> None:
    """Train local, FedIT and FedMerge on a small synthetic federation with a tiny base. Nothing is downloaded."""
    from llm_fed.commands import quickstart as demo

    results = demo.run(out_dir, seed)
    print_scores(beside_baselines(results))
    for result in results.values():
        print_warnings({"warnings": result.get("warnings", ())})
    finished = out_dir / "fedmerge"
    program, run_dir = program_name(), shlex.quote(str(finished))
    out.print(
        f"report (open it in a browser): {finished / 'report.html'}\n"
        f"merging weights: {out_dir / 'merging_weights.png'}; personal adapters: {finished / 'adapters'}\n"
        "Next steps:\n"
        f"  {program} eval {run_dir} --split validation  # score the adapters on the validation examples\n"
        f"  {program} export {run_dir} {shlex.quote(str(out_dir / 'copies'))}  # copy the adapters as PEFT folders\n"
        f"  {program} methods  # list all methods\n"
        "README.md shows how to train on your own data."
    )


@app.command(rich_help_panel="Train and compare")
def compare(
    config: Annotated[
        Path,
        typer.Argument(help="A YAML file; its compare section can list rows and seeds. With --runs: a finished run."),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value settings for all rows, e.g. rounds=20. With --runs: more finished runs."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="The rows or methods to compare, e.g. local,fedit; a name with a comma stands in quotes (default: all "
            "rows of the file)."
        ),
    ] = "",
    seeds: Annotated[str, typer.Option(help="The seeds, e.g. 0,1,2 (default: those of the file).")] = "",
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Draw N federations, each with its own training seed; the same as --seeds 0,...,N-1."),
    ] = None,
    runs: Annotated[bool, typer.Option("--runs", help="Train nothing: give the verdict on finished runs.")] = False,
    out_dir: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="The folder for runs and tables (default: runs/compare-<config>; with --runs, nothing is written).",
        ),
    ] = None,
    jobs: Annotated[
        str,
        typer.Option(
            metavar="N|ray",
            help="Train N runs at a time, each in a process of its own with a share of the cores; ray: as many as the "
            "machines of a Ray cluster can.",
        ),
    ] = "1",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Train nothing: list the runs.")] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Train several methods with several seeds, and write one table with a verdict. The same command continues an
    interrupted comparison."""
    if runs:
        if methods or seeds or draws or jobs != "1" or dry_run:
            raise UserError(
                "--runs compares finished runs and trains nothing; leave out --methods, --seeds, --draws, --jobs and "
                "--dry-run"
            )
        from llm_fed.commands import finished

        found = finished.compare_runs([config, *map(Path, settings or [])])
        _print_verdict(found, found.for_terminal(), out_dir, as_json)
        return
    from llm_fed.basics.documents import names_of
    from llm_fed.commands import section

    try:
        numbers = [int(seed) for seed in seeds.split(",") if seed]
    except ValueError as error:
        raise UserError(f"--seeds is {seeds!r}; it takes whole numbers separated by commas, e.g. 0,1,2") from error
    at_a_time = int(jobs) if jobs.isdecimal() else jobs
    rows = section.read_rows(config, settings or [], names_of("--methods", methods), numbers, draws or 0)
    rows.check()
    from llm_fed.commands import compare as comparison  # takes seconds, so mistakes are named first

    folder = out_dir or Path("runs") / f"compare-{config.stem}"
    if dry_run:
        print_result(*_planned(*comparison.dry_run(rows, folder, jobs=at_a_time)), as_json)
        return
    table = comparison.compare(rows, folder, jobs=at_a_time)
    written = f"table.html, table.md, table.csv, table.json, its pictures and the runs are in {folder}"
    print_result(table.as_json(), [*table.for_terminal(), written, *_chosen(table, folder)], as_json)
    if failed := table.failed:
        raise RunError(f"{failed} failed, see table.md; give the same command again to retry")


def _chosen(table: Table, folder: Path) -> list[str]:
    """Which row validation examples choose, and what to do with its models; nothing where there is no choice."""
    from llm_fed.scoring.scores import reads_texts

    scores = table.by_validation
    if len(scores) < 2:
        return []
    best, *others = (f"{label} ({mean:.1f})" for label, mean in scores.items())
    row = next(row for row in table.rows if row.label == next(iter(scores)))
    run = shlex.quote(str(folder / row.results[table.seeds[0]].folder))
    steps = [f"chat {run}"] if reads_texts(table.metric) else []
    steps.append(f"export {run} adapters  # a PEFT folder per client")
    lines = [f"  {program_name()} {step}" for step in steps]
    return [f"by validation: {best}, before {', '.join(others)}. Next:", *lines]


def _planned(jobs: Sequence[Job], together: int | str) -> tuple[dict[str, object], list[str]]:
    """The runs of a comparison, and how many are trained at a time, for programs and for people."""
    runs, lines = list[dict[str, object]](), []
    for job in jobs:
        complete, begun, parents = bool(job.outcome), job.begun, [parent.shown for parent in job.parents.values()]
        runs.append({"folder": job.shown, "complete": complete, "begun": begun, "starts_from": parents})
        state = "is complete" if complete else "would continue" if begun else "would be a new run"
        lines.append(f"{'run':<11}{job.shown} {state}" + (f", after {' and '.join(parents)}" if parents else ""))
    return {"jobs": together, "runs": runs}, [*lines, f"{'at a time':<11}{together}"]


@app.command(rich_help_panel="Train and compare")
def verdict(
    scores: Annotated[Path, typer.Argument(help="A CSV file with the columns row, draw, client and score (0-100).")],
    drawn: Annotated[str, typer.Option(help="What a draw draws anew: federations, splits, fixed or trainings.")],
    test_share: Annotated[
        float | None,
        typer.Option(help="The part of its rows that a client tests, of splits of less than four clients."),
    ] = None,
    these_clients: Annotated[
        bool, typer.Option("--these-clients", help="Claim something about these clients alone, not about their kind.")
    ] = False,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="A folder for verdict.md and verdict.png (default: none are written).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which differences in a table of scores are shown, whoever made it, as `compare` does of its own."""
    from llm_fed.commands import api, finished

    found = api.verdict(
        finished.read_scores(scores), drawn=cast("Drawn", drawn), test_share=test_share, these_clients=these_clients
    )
    _print_verdict(found, str(found).splitlines(), out_dir, as_json)


def _print_verdict(found: Verdict, lines: list[str], out_dir: Path | None, as_json: bool) -> None:
    from llm_fed.commands import finished

    print_result(found.as_json(), [*lines, *([finished.write(found, out_dir)] if out_dir else [])], as_json)
