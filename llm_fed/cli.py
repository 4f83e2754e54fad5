"""The command line `llm-fed`: thin commands over the library, errors in one or two lines, results on standard
output."""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from llm_fed.errors import RunError, UserError, printable
from llm_fed.plugins import short


class _Commands(TyperGroup):
    """The commands, with all of their help: to rich a [bracket] would be a style, and typer 0.20 loses the words about
    arguments with click 8.5."""

    def __init__(self, *, commands: Any = None, **settings: Any):
        for command in (commands or {}).values():
            command.help = escape(command.help or "")
            hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
            for parameter in command.params:
                about = getattr(hints.get(parameter.name), "__metadata__", ())
                parameter.help = escape(getattr(parameter, "help", None) or (about[0].help if about else None) or "")
        super().__init__(commands=commands, **settings)


app = typer.Typer(
    name="llm-fed",
    cls=_Commands,
    help="Federated LoRA fine-tuning with personal models by merging.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
# A [bracket] or a :word: in what is printed is text: the name of a client, a value, a path.
out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


# What is no fault of the program, wherever it comes up: a full or read-only disk, missing rights, a name too long.
_OF_THE_DISK = (
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
)  # fmt: skip

UsageError: Any = typer.BadParameter.__base__  # click's, or the one that later versions of typer have of their own


def main(arguments: list[str] | None = None) -> None:
    """Run a command. Exit code 0: done; 2: a mistake in what was given; 1: a failure; 130: interrupted.

    Of several processes under `accelerate launch`, rank 0 runs it; the others work for it and say nothing.
    """
    with _other_ranks():
        _command(arguments)


@contextmanager
def _other_ranks() -> Iterator[None]:
    """At rank 0 of a launch: the others, until it is done. At the others: all that they do, and the end."""
    if "LOCAL_RANK" not in os.environ:  # no launcher; what follows takes seconds to import
        yield
        return
    from llm_fed.experiment.run import serve
    from llm_fed.runtime.launch import connect, other_ranks

    channel = connect()
    if channel and channel.rank:
        try:
            serve()
        except (KeyboardInterrupt, RunError) as error:  # rank 0 says what there is to say
            raise SystemExit(1) from error
        raise SystemExit(0)
    with other_ranks() or nullcontext():
        yield


def _command(arguments: list[str] | None) -> None:
    try:
        code = app(arguments, prog_name="llm-fed", standalone_mode=False)
    except UsageError as error:
        if text := error.format_message():  # without any word, the help has been shown
            _stop(f"{text}\nSee {error.ctx.command_path if error.ctx else 'llm-fed'} --help", 2)
        code = 2
    except UserError as error:
        _stop(error, 2)
    except RunError as error:
        _stop(error, 1)
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        where = error.filename or "a file"
        _stop(f"cannot use {where}: {error.strerror}; fix that or give another path, then repeat the command", 1)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    if code == 130:  # typer turns Ctrl-C into this exit code
        _stop("interrupted; give the same command again to continue from the last checkpoint", 130)
    raise SystemExit(code or 0)


def _stop(message: object, code: int) -> None:
    print(f"llm-fed: {printable(str(message))}", file=sys.stderr)
    raise SystemExit(code)


def _version(asked: bool) -> None:
    if asked:
        print(f"llm-fed {importlib.metadata.version('llm-fed')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Federated LoRA fine-tuning with personal models by merging."""


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="A YAML file: yours, or one that `llm-fed runs` lists.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value settings that override the file, e.g. local.lr=1e-4.")
    ] = None,
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
    as_json: Json = False,
) -> None:
    """Train a federation. The same command continues an interrupted run, and extends a finished one with rounds=N."""
    train_command(config, settings or [], out_dir, fresh, start, dry_run=dry_run, as_json=as_json)


def train_command(
    config: Path,
    settings: list[str],
    out_dir: Path | None,
    fresh: bool,
    start: Path | None = None,
    *,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """What `llm-fed run` and `scripts/train.py` do."""
    from llm_fed import api

    resolved = api.resolve(config, settings, out_dir, start)
    folder = out_dir or api.default_folder(config, resolved)
    from llm_fed.experiment import run as experiment  # takes seconds, so mistakes are named first

    experiment.quiet()
    if dry_run:
        plan = experiment.dry_run(resolved, folder, fresh=fresh)
        if as_json:
            print(json.dumps(plan.as_json()))
            return
        for line in plan.for_terminal(folder):
            out.print(line)
        return
    result = experiment.train(resolved, folder, fresh=fresh)
    if as_json:
        print(json.dumps(result))
        return
    _print_scores(_beside_base({str(result["method"]): result}))
    out.print(f"adapters, metrics and report.html are in {folder}")


@app.command()
def quickstart(
    out_dir: Annotated[Path, typer.Option("--out", help="The folder for the runs.")] = Path("runs/quickstart"),
    seed: Annotated[int, typer.Option(help="Seed of the data, the adapters and the training.")] = 0,
) -> None:
    """Train local, FedIT and FedMerge on a small synthetic federation with a tiny base. Nothing is downloaded."""
    from llm_fed.commands import quickstart as demo

    results = demo.run(out_dir, seed)
    _print_scores(_beside_base(results))
    finished = out_dir / "fedmerge"
    program, run_dir = _program(), shlex.quote(str(finished))
    out.print(
        f"report (open it in a browser): {finished / 'report.html'}\n"
        f"merging weights: {out_dir / 'merging_weights.png'}; personal adapters: {finished / 'adapters'}\n"
        "Next steps:\n"
        f"  {program} eval {run_dir} --split validation  # score the adapters on the validation examples\n"
        f"  {program} export {run_dir} {shlex.quote(str(out_dir / 'copies'))}  # copy the adapters as PEFT folders\n"
        f"  {program} methods  # list all methods\n"
        "README.md shows how to train on your own data."
    )


@app.command()
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
        str, typer.Option(help="The rows or methods to compare, e.g. local,fedit (default: all rows of the file).")
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
    as_json: Json = False,
) -> None:
    """Train several methods with several seeds, and write one table with a verdict. The same command continues an
    interrupted comparison."""
    if runs:
        if methods or seeds or draws:
            raise UserError(
                "--runs compares finished runs and trains nothing; leave out --methods, --seeds and --draws"
            )
        _verdict_on_runs([config, *map(Path, settings or [])], out_dir, as_json)
        return
    if draws and seeds:
        raise UserError(
            f"--draws {draws} is the same as --seeds {','.join(map(str, range(draws)))}; give only one of the two"
        )
    from llm_fed.commands import section

    try:
        numbers = [int(seed) for seed in seeds.split(",") if seed]
    except ValueError as error:
        raise UserError(f"--seeds is {seeds!r}; it takes whole numbers separated by commas, e.g. 0,1,2") from error
    numbers = list(range(draws)) if draws else numbers
    names = [name.strip() for name in methods.split(",") if name.strip()]
    planned = section.read_rows(config, settings or [], names, numbers)
    if draws:
        planned.check_draws()
    planned.check()
    from llm_fed.commands import compare as comparison  # takes seconds, so mistakes are named first
    from llm_fed.experiment.run import quiet

    folder = out_dir or Path("runs") / f"compare-{config.stem}"
    quiet()
    table = comparison.compare(config, settings or [], chosen=names, seeds=numbers, out=folder)
    if as_json:
        print(json.dumps(table.as_json()))
    else:
        for part in table.for_terminal():
            out.print(part)
        out.print(f"table.html, table.md, table.csv, table.json, {_count(table.pictures)} and the runs are in {folder}")
    if failed := table.failed:
        raise RunError(f"{failed} failed, see table.md; give the same command again to retry")


def _verdict_on_runs(folders: list[Path], out_dir: Path | None, as_json: bool) -> None:
    from llm_fed.commands import finished

    verdict = finished.compare_runs(folders)
    written = finished.write(verdict, out_dir) if out_dir else []
    if as_json:
        print(json.dumps(verdict.as_json()))
        return
    for line in [*verdict.for_terminal(), *verdict.variance]:
        out.print(line)
    if written:
        out.print(f"{' and '.join(written)} are in {out_dir}" if len(written) > 1 else f"verdict.md is in {out_dir}")


@app.command()
def merge(
    method: Annotated[
        str, typer.Argument(help="A merging method: potara, ties, slerp, ... (`llm-fed methods` lists them).")
    ],
    fed: Annotated[str, typer.Option(help="The federated adapter: a run, RUN@ROUND, or a PEFT folder.")],
    local: Annotated[str, typer.Option(help="The local adapter: a run, RUN@ROUND, or a PEFT folder.")],
    out_dir: Annotated[
        Path, typer.Option("--out", help="The folder for the merged adapters, a PEFT folder per client.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value settings of the method or the task, e.g. method.density=0.3 for ties."),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="For PEFT folders: the task whose examples are used; needs --client.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="For PEFT folders: a file of examples, or the local data of --task.")
    ] = None,
    client: Annotated[str | None, typer.Option(help="Merge only this client's adapters.")] = None,
    base: Annotated[str | None, typer.Option(help="The base model (default: the one that the adapters name).")] = None,
    template: Annotated[
        str | None, typer.Option(help="The prompt template (default: the one saved with the adapters).")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="For PEFT folders: the dtype of the base: float32, bfloat16, float16 or auto.")
    ] = "float32",
    space: Annotated[
        str | None, typer.Option(help="What is mixed: factors (A and B) or delta (the product B A; rank 2r).")
    ] = None,
    fisher: Annotated[
        str | None, typer.Option(help="Labels for the Fisher information: empirical (data) or sampled (model).")
    ] = None,
    fisher_data: Annotated[
        str | None,
        typer.Option(help="Examples for the Fisher information: train, or held-out (validation; of a file, a tenth)."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="How many examples the mixing weights are computed from (default: 30).")
    ] = None,
    damping: Annotated[
        float | None, typer.Option(help="Damping of the Fisher information, relative to its mean (default: 1e-3).")
    ] = None,
    per_factor: Annotated[
        bool, typer.Option("--per-factor", help="Use one mixing weight for A and another for B.")
    ] = False,
    grid: Annotated[
        bool, typer.Option("--grid", help="Also score the mixing weights 0, 0.1, ..., 1, for comparison.")
    ] = False,
    weight: Annotated[
        float | None, typer.Option(help="For mean: the weight of the federated adapter (default: 0.5).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Merge a federated and a local adapter: POTARA's closed form, Fisher merging, a mean, or the best of a grid."""
    from llm_fed import configfile

    configfile.keys_of(settings or [], "the method")  # what follows takes seconds, so mistakes are named first
    from llm_fed.commands import merge as posthoc
    from llm_fed.eval.merges import for_terminal
    from llm_fed.experiment.run import quiet

    quiet()
    asked = {
        "space": space, "fisher": fisher, "fisher_data": fisher_data, "samples": samples, "damping": damping,
        "weight": weight, "per_factor": per_factor or None, "grid": grid or None,
    }  # fmt: skip
    merged = posthoc.merge_adapters(
        posthoc.settings(method, {key: value for key, value in asked.items() if value is not None}),
        posthoc.Parents(fed, local, base), out_dir, data=posthoc.Data(task, data, template, dtype), client=client,
        words=settings or [],
    )  # fmt: skip
    if as_json:
        clients = {item.client: {"folder": str(item.folder), **item.recipe} for item in merged}
        print(json.dumps({"method": method, "clients": clients}))
        return
    for table in for_terminal({item.client: item.recipe for item in merged}):
        out.print(table)
    for item in merged:
        if "note" in item.recipe:
            out.print(f"{item.client}: {item.recipe['note']}")
    out.print(f"wrote one PEFT folder per client to {out_dir}")


@app.command()
def join(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a finished run, whose adapters are merged.")],
    data: Annotated[
        Path, typer.Option(help="The new client's examples: a file in the same form as those of the run's clients.")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="The PEFT folder to write.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value settings that override the run's, e.g. task.columns.prompt=question."),
    ] = None,
    examples: Annotated[
        int, typer.Option(min=1, help="How many examples, drawn at random, the merging weights are fitted to, at most.")
    ] = 16,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Then fine-tune for N steps on all examples (default: no fine-tuning)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a personal adapter for a client that took no part in a run, in seconds: merge the run's adapters with
    weights fitted to the client's examples."""
    from llm_fed import configfile

    configfile.keys_of(settings or [], "the run folder")  # what follows takes seconds, so mistakes are named first
    from llm_fed.commands import join as joining
    from llm_fed.experiment.run import quiet

    quiet()
    joined = joining.join(run_dir, data, out_dir, examples=examples, steps=steps, words=settings or [])
    if as_json:
        print(json.dumps({"folder": str(joined.folder), **joined.recipe}))
        return
    for line in joined.for_terminal():
        out.print(line)


@app.command("eval")
def evaluate(
    run_dir: Annotated[Path | None, typer.Argument(help="The folder of a finished run.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="key=value settings that override the run's, e.g. eval.max_new_tokens=64."),
    ] = None,
    split: Annotated[str, typer.Option(help="The split to score on: test or validation.")] = "test",
    base: Annotated[str | None, typer.Option(help="Instead of a run: a base model, Hub id or folder.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="With --base: a PEFT adapter folder (default: the base alone).")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="With --base: the task to score on (`llm-fed tasks` lists them).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="With --base: a file of examples, or the local data of --task.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The metric (default: that of the run or the task).")] = None,
    template: Annotated[
        str | None, typer.Option(help="With --base: the prompt template (default: the one saved with the adapter).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --base: its dtype: float32, bfloat16, float16 or auto.")] = "float32",
    limit: Annotated[int | None, typer.Option(help="Score at most this many examples per client.")] = None,
    cross: Annotated[
        bool, typer.Option("--cross", help="Score each client's adapter on every client's examples, for the report.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Score the personal adapters of a run, or a base model with or without an adapter. Scores are 0-100."""
    from llm_fed import configfile

    words = settings or []
    if run_dir is not None and "=" in str(run_dir) and not run_dir.exists():  # no folder, but the first setting
        run_dir, words = None, [str(run_dir), *words]
    if (run_dir is None) == (base is None):
        raise UserError("give either a run folder or --base (with or without --adapter); see llm-fed eval --help")
    if cross and run_dir is None:
        raise UserError("--cross compares the adapters of a run's clients, so it needs a run folder and not --base")
    configfile.keys_of(words, "the run folder" if run_dir is not None else "--base")
    # What follows takes seconds, so mistakes are named first.
    from llm_fed.commands.evaluate import Data, evaluate_adapter, evaluate_run
    from llm_fed.experiment.run import quiet

    quiet()
    if run_dir is not None:
        alone = {"--adapter": adapter, "--task": task, "--data": data, "--template": template}
        if given := [option for option, value in alone.items() if value is not None]:
            raise UserError(f"{given[0]} only works with --base; override a run's own by settings such as "
                            "task.path=FOLDER or task.template=chat")  # fmt: skip
        if cross:
            from llm_fed.commands.cross import cross_scores

            _print_cross(
                run_dir, cross_scores(run_dir, split=split, metric=metric, limit=limit, settings=words), as_json
            )
            return
        summary = evaluate_run(run_dir, split=split, metric=metric, limit=limit, settings=words)
    else:
        summary = evaluate_adapter(
            str(base), adapter, Data(task, data, template, dtype), split=split, metric=metric, limit=limit,
            settings=words,
        )  # fmt: skip
    if as_json:
        print(json.dumps(summary.as_json()))
    else:
        _print_scores({summary.metric: summary.as_json()})


@app.command()
def init(
    data: Annotated[str, typer.Argument(help="A folder with a file or a folder per client, or one file for all.")],
    out_file: Annotated[
        Path | None, typer.Option("--out", help="The configuration to write (default: the name of DATA with .yaml).")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The base model, a Hub id or a folder.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The column that holds the prompt.")] = None,
    input_column: Annotated[
        str | None, typer.Option("--input", help="The column that holds the input, which is put after the prompt.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The column that holds the answer.")] = None,
    client: Annotated[str | None, typer.Option(help="With one file: the column that names each row's client.")] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="With one file: split the rows at random among this many clients.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="The method (default: fedmerge; `llm-fed methods` lists all).")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing, and accept what the data suggests.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing configuration.")] = False,
) -> None:
    """Inspect your data and write a commented configuration for it. You are asked what the data does not tell."""
    from llm_fed.commands import init as starting

    path = out_file or Path(f"{Path(data).resolve().name.partition('.')[0]}.yaml")
    if path.exists() and not force:
        raise UserError(f"{path} already exists; give another --out, or --force to overwrite it")
    columns = {"prompt": prompt, "input": input_column, "answer": answer, "client": client}
    given = starting.Given(data, base, {role: name for role, name in columns.items() if name}, clients, method)

    def ask(question: str, usual: str) -> str:
        return str(typer.prompt(question, default=usual, err=True))

    found = starting.draft(given, None if yes or not sys.stdin.isatty() else ask)
    starting.write(path, found.text, force=force)
    for what, words in found.findings.items():
        out.print(f"{what:<11}{words}")
    for warning in found.warnings:
        out.print(f"{'warning':<11}{warning}")
    run_dir = shlex.quote(str(Path("runs") / path.stem))
    program, config = _program(), shlex.quote(str(path))
    out.print(
        f"wrote {path}. Next:\n"
        f"  {program} run {config} --dry-run  # show the plan and the memory it needs\n"
        f"  {program} run {config} --out {run_dir}\n"
        f"  {program} chat {run_dir}"
    )


@app.command()
def audit(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    rounds: Annotated[str | None, typer.Option(help="The rounds to train again, e.g. 1,5.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="Train this many rounds again, drawn with the run's seed (default: 3).")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Train all rounds again.")] = False,
    as_json: Json = False,
) -> None:
    """Check a run against its recorded digests, and reproduce some of its rounds. The exit code is 1 if anything
    differs."""
    from llm_fed.commands.audit import show

    if not show(run_dir, rounds, sample, every, as_json):
        raise typer.Exit(1)


@app.command()
def chat(
    run_dir: Annotated[Path | None, typer.Argument(help="The folder of a finished run.")] = None,
    client: Annotated[str | None, typer.Option(help="Start with this client's adapter (default: the first).")] = None,
    base: Annotated[str | None, typer.Option(help="Instead of a run: a base model, Hub id or folder.")] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="With --base: a PEFT adapter folder (default: the base alone).")
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="With --base: the prompt template (default: the one saved with the adapter).")
    ] = None,
    dtype: Annotated[str, typer.Option(help="With --base: its dtype: float32, bfloat16, float16 or auto.")] = "float32",
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens (default: the value saved with the adapter).")
    ] = None,
) -> None:
    """Chat with the personal adapters of a run, or with a base model. Decoding is greedy. Type /client NAME, /base,
    /reset or /quit. If standard input is not a terminal, each line is one prompt."""
    if (run_dir is None) == (base is None):
        raise UserError("give either a run folder or --base (with or without --adapter); see llm-fed chat --help")
    if run_dir is not None and (given := adapter or template):
        raise UserError(
            f"{given}: --adapter and --template only work with --base; leave them out, as a run brings its own"
        )
    if base is not None and client is not None:
        raise UserError(f"--client {client} only works with a run folder; with --base, give --adapter DIR")
    # What follows takes seconds, so mistakes are named first.
    from llm_fed.commands import chat as chatting
    from llm_fed.experiment.run import quiet

    quiet()
    if run_dir is not None:
        opened = chatting.of_run(run_dir, client, max_new_tokens)
    else:
        opened = chatting.of_base(str(base), adapter, template, dtype, max_new_tokens)
    someone = sys.stdin.isatty()
    if someone:
        with suppress(ImportError):  # arrow keys and history, where Python has it
            import readline  # noqa: F401
    chatting.talk(opened, input if someone else lambda _: input(), shows_help=someone)


@app.command()
def export(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    out_dir: Annotated[Path, typer.Argument(help="The folder for the copies, with one folder per client.")],
    client: Annotated[list[str] | None, typer.Option(help="Only this client; may be repeated.")] = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Write whole models, with the adapter merged into the base: no PEFT needed."),
    ] = False,
) -> None:
    """Copy the personal adapters of a run as PEFT folders, and tell on standard error which of them vLLM and LoRAX can
    serve."""
    from llm_fed.commands import evaluate as runs
    from llm_fed.export import serving

    if merged:
        from llm_fed.experiment.run import quiet
        from llm_fed.export import merged as whole

        quiet()
        plan = whole.plan(run_dir, out_dir, client or [])
        print(printable(plan.said), file=sys.stderr)
        for folder in plan.write():
            out.print(str(folder))
        return
    folders = runs.export(run_dir, out_dir, client or [])
    for folder in folders:
        out.print(str(folder))
    for line in serving.lines({folder.name: serving.servable(folder) for folder in folders}):
        print(printable(line), file=sys.stderr)


@app.command()
def push(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a finished run.")],
    namespace: Annotated[str, typer.Argument(help="Your user name on the Hub, or an organisation's name.")],
    client: Annotated[list[str] | None, typer.Option(help="Only this client; may be repeated.")] = None,
    private: Annotated[bool, typer.Option("--private", help="Make the repositories private.")] = False,
    license: Annotated[
        str | None, typer.Option(help="The adapters' licence, as the Hub's id (default: that of the base, or other).")
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="The repositories are named NAMESPACE/PREFIX-<client> (default: the run folder's name)."),
    ] = None,
    one_repository: Annotated[
        bool, typer.Option("--one-repository", help="Use one repository, NAMESPACE/PREFIX, with a folder per client.")
    ] = False,
) -> None:
    """Push the personal adapters of a run to the Hub, one PEFT repository per client. A repeated push commits only
    what changed."""
    from llm_fed.experiment.run import quiet
    from llm_fed.export import hub

    quiet()
    hub.quiet()
    for pushed in hub.push(
        run_dir, namespace, clients=client or [], private=private, license=license, prefix=prefix,
        one_repository=one_repository,
    ):  # fmt: skip
        out.print(f"{'pushed   ' if pushed.changed else 'unchanged'} {pushed.url}")


@app.command()
def flower(
    config: Annotated[Path, typer.Argument(help="A YAML file: yours, or one that `llm-fed runs` lists.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value settings that override the file, e.g. network.clients=8.")
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="The folder of the app (default: apps/<config>-<method>).")
    ] = None,
) -> None:
    """Write a Flower app that runs the federation with its clients on other machines. Each machine needs Flower: in a
    clone, pip install -e '.[flower]'."""
    from llm_fed import configfile
    from llm_fed.commands import section

    loaded = configfile.load(config, settings or [])
    section.check(loaded, data=False)
    from llm_fed.network import flower_app  # with torch, so mistakes are named first

    name = f"{config.stem}-{short(str(loaded.method['name']))}"
    folder = out_dir or Path("apps") / name
    note = flower_app.write(folder, loaded, name)
    out.print(f"wrote {folder}. Next: flwr run {folder} SUPERLINK --stream{note}")


@app.command()
def methods(as_json: Json = False) -> None:
    """List the methods with their papers and settings."""
    from llm_fed.commands.methods import rows

    _print_list(rows(), as_json)


@app.command()
def runs(as_json: Json = False) -> None:
    """List the configurations and launch files that llm_fed ships. Use one by its name: llm-fed run flan.yaml."""
    from llm_fed import shipped

    _print_list(shipped.rows(), as_json)


@app.command()
def tasks(as_json: Json = False) -> None:
    """List the tasks with their metrics and sources."""
    from llm_fed.tasks import describe

    _print_list(describe(), as_json)


@app.command()
def doctor(
    base: Annotated[
        str | None, typer.Option(help="Instead, show what llm_fed can do with this base: a folder or a Hub id.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show this machine's hardware and packages, and test a fused training step, a 4-bit layer and the metrics."""
    from llm_fed.experiment.run import quiet

    quiet()
    if base is None:
        from llm_fed.commands.doctor import examine

        findings = examine()
    else:
        from llm_fed.commands.bases import known_of

        findings = known_of(base)
    if as_json:
        print(json.dumps(findings))
    else:
        for finding in findings:
            out.print(f"{'ok  ' if finding['ok'] else 'FAIL'} {finding['what']}: {finding['found']}")
    if not all(finding["ok"] for finding in findings):
        raise RunError("some checks failed; see the lines marked FAIL")


def _beside_base(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The scores of runs on the same data by name, after those of the base alone where that was scored."""
    base = [("base", result["base"]) for result in results.values() if "base" in result][:1]
    return dict(base) | {name: result["scores"] for name, result in results.items()}


def _program() -> str:
    """How to call this program from here: by its name, or where it is not on the path by its file."""
    beside = Path(sys.executable).with_name("llm-fed")
    return "llm-fed" if shutil.which("llm-fed") or not beside.exists() else shlex.quote(os.path.relpath(beside))


def _count(pictures: list[Path]) -> str:
    return f"{len(pictures)} picture{'' if len(pictures) == 1 else 's'}"


def _print_scores(scores: dict[str, dict[str, Any]]) -> None:
    """A row per client and a column per method (or metric)."""
    scores = {name: score for name, score in scores.items() if "clients" in score}
    if not scores:
        out.print("There are no scores, because no client has test examples.")
        return
    metric = next(iter(scores.values()))["metric"]
    table = Table(title=f"{metric} (0-100)", title_justify="left")
    table.add_column("client")
    for name in scores:
        table.add_column(name, justify="right")
    for client in next(iter(scores.values()))["clients"]:
        table.add_row(client, *(f"{score['clients'][client]:.1f}" for score in scores.values()))
    if len(next(iter(scores.values()))["clients"]) == 1:
        out.print(table)
        return
    table.add_section()
    for key, label in (("mean", "mean"), ("std", "std over clients"), ("worst_half", "worst half")):
        table.add_row(label, *(f"{score[key]:.1f}" for score in scores.values()))
    out.print(table)


def _print_cross(folder: Path, found: dict[str, Any], as_json: bool) -> None:
    """A row per client's model and a column per client, of few clients; where all of them are in any case."""
    if as_json:
        print(json.dumps(found))
        return
    if len(found["clients"]) <= 8:  # more are too wide for a terminal
        table = Table(title=f"{found['metric']} (0-100)", title_justify="left")
        for name in ("model of", *found["clients"]):
            table.add_column(name, justify="left" if name == "model of" else "right")
        for client, row in zip(found["clients"], found["scores"], strict=True):
            table.add_row(client, *(f"{score:.1f}" for score in row))
        out.print(table)
    out.print(f"the whole table is in {folder / 'cross.json'} and {folder / 'report.html'}")


def _print_list(entries: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(entries))
        return
    for entry in entries:
        out.print(entry["name"], style="bold")
        ranges = entry.get("ranges", {})
        for key, value in entry.items():
            if key == "settings" and value:
                out.print("  settings:")
                for name, default in value.items():
                    out.print(f"    {name}={default}" + (f" ({ranges[name]})" if name in ranges else ""))
            elif key not in ("name", "ranges") and value not in ([], {}, None, ""):
                out.print(f"  {key}: {', '.join(value) if isinstance(value, list) else value}")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
