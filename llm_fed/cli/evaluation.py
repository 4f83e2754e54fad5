"""Commands on a run that is there: eval, report, audit, forget and chat."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from llm_fed.basics.errors import UserError, printable
from llm_fed.cli.printing import (
    RUN,
    TEMPLATE,
    Allow,
    Json,
    Settings,
    beside_baselines,
    out,
    print_cross,
    print_result,
    print_scores,
    print_warnings,
    words_of,
)
from llm_fed.cli.program import app

BaseName = Annotated[str | None, typer.Option(help="Instead of a run: a base model, Hub id or folder.")]
AdapterFolder = Annotated[
    Path | None, typer.Option(help="With --base: a PEFT adapter folder (default: the base alone).")
]
Template = Annotated[
    str | None, typer.Option(help=f"With --base: {TEMPLATE} (default: the one saved with the adapter).")
]
Dtype = Annotated[
    str | None,
    typer.Option(help="With --base: its float32, bfloat16, float16 or auto (default: as in training, or float32)."),
]


@app.command("eval", rich_help_panel="Use a finished run")
def evaluate(
    run_dir: Annotated[Path | None, typer.Argument(help=RUN)] = None,
    settings: Settings = None,
    split: Annotated[str, typer.Option(help="The split to score on: test or validation.")] = "test",
    base: BaseName = None,
    adapter: AdapterFolder = None,
    task: Annotated[
        str | None, typer.Option(help="With --base: the task to score on (`llm-fed tasks` lists them).")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="With --base: a file of examples, or the local data of --task.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="The metric (default: that of the run or the task).")] = None,
    template: Template = None,
    dtype: Dtype = None,
    limit: Annotated[int | None, typer.Option(help="Score at most this many examples per client.")] = None,
    cross: Annotated[
        bool, typer.Option("--cross", help="Score each client's adapter on every client's examples, for the report.")
    ] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Score the personal adapters of a run, or a base model with or without an adapter. Scores are 0-100."""
    from llm_fed.settings import configfile

    words = [*(settings or [])]
    if run_dir is not None and "=" in str(run_dir) and not run_dir.exists():  # no folder, but the first setting
        run_dir, words = None, [str(run_dir), *words]
    _check_what("eval", run_dir, base, {"--adapter": adapter, "--task": task, "--data": data, "--template": template})
    if cross and run_dir is None:
        raise UserError("--cross compares the adapters of a run's clients, so it needs a run folder and not --base")
    configfile.keys_of(words, "the run folder" if run_dir is not None else "--base")
    options = {"eval.metric": metric, "eval.limit": limit, "task.name": task, "task.path": data}
    words += words_of({**options, "task.template": template, "base.dtype": dtype})
    # What follows takes seconds, so mistakes are named first.
    from llm_fed.commands.evaluate import evaluate_adapter, evaluate_run

    if run_dir is not None:
        from llm_fed.experiment.rounds import opened

        with opened(run_dir, everybody=True) as folder:
            if cross:
                from llm_fed.commands.cross import cross_scores

                own = folder == run_dir
                print_cross(
                    run_dir if own else None, cross_scores(folder, split=split, settings=words, keep=own), as_json
                )
                return
            result = evaluate_run(folder, split=split, settings=words)
        if as_json:
            known = {kind: result.get(kind) for kind in ("base", "rule")}
            print(json.dumps(result["scores"] | known | {"warnings": result["warnings"]}))
        else:
            print_scores(beside_baselines({result["method"]: result}))
            print_warnings(result)
        return
    summary = evaluate_adapter(str(base), adapter, words, split=split)
    if as_json:
        print(json.dumps(summary.as_json()))
    else:
        print_scores({summary.metric: summary.as_json()})


def _check_what(command: str, run_dir: Path | None, base: str | None, alone: Mapping[str, object]) -> None:
    """Refuse a run beside a base, or neither; and with a run an option that stands for what a run brings itself."""
    if (run_dir is None) == (base is None):
        raise UserError(f"give either a run folder or --base (with or without --adapter); see llm-fed {command} --help")
    if run_dir is not None and (given := [option for option, value in alone.items() if value is not None]):
        others = "override it by settings such as task.path=FOLDER" if command == "eval" else "leave it out"
        raise UserError(f"{given[0]} only works with --base, as a run brings its own; {others}")


@app.command(rich_help_panel="Use a finished run")
def report(
    run_dir: Annotated[Path, typer.Argument(help="A run folder; the run may be finished, interrupted, or go on.")],
) -> None:
    """Write report.html of a run anew: as far as it has come, or with the pages of this version."""
    from llm_fed.eval.report import write_anew

    out.print(str(write_anew(run_dir)))


@app.command(rich_help_panel="Use a finished run")
def audit(
    run_dir: Annotated[Path, typer.Argument(help="A run folder, finished or not.")],
    rounds: Annotated[str | None, typer.Option(help="The rounds to train again, e.g. 1,5.")] = None,
    sample: Annotated[
        int | None, typer.Option(min=0, help="Train this many rounds again, drawn anew each time (default: 3).")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Train all rounds again.")] = False,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Check a run against its recorded digests, and reproduce some of its rounds. The exit code is 0 if all that was
    looked at is the same, 1 if anything differs, and 3 if nothing differs but something could not be verified."""
    if sum(given is not None for given in (rounds, sample)) + every > 1:
        raise UserError("give only one of --rounds, --sample and --all")
    try:
        chosen = [int(word) for word in rounds.split(",")] if rounds else []
    except ValueError as error:
        raise UserError(f"--rounds {rounds} is not a list of rounds; give numbers, e.g. --rounds 1,5") from error
    from llm_fed.audit import audit as auditing  # takes seconds, so mistakes are named first

    found = auditing.audit(run_dir, rounds=chosen, sample=sample, every=every)
    outcome = {0: "nothing differs", 1: "differs", 3: "not verified"}[found.code]
    lines = [f"checked      {line}" for line in found.checked]
    lines += [f"NOT VERIFIED {line}" for line in found.unchecked]
    for item in found.findings:
        where = f"round {item.round}" + (f", {item.client}" if item.client else "")
        lines.append(f"DIFFERS      {where}: {item.kind}: {item.what}")
    lines.append(f"{len(found.findings)} findings" if found.findings else outcome)
    print_result({"outcome": outcome, **asdict(found)}, lines, as_json)
    raise typer.Exit(found.code)


@app.command(rich_help_panel="Use a finished run")
def forget(
    run_dir: Annotated[
        Path, typer.Argument(help="The folder of a finished run, all of whose rows are on this machine.")
    ],
    client: Annotated[str, typer.Option(help="Whom the run forgets.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: say what it costs, and begin.")] = False,
    allow: Allow = None,
) -> None:
    """Make a run what it would be if a client had never been there, by training it again without the client. Until
    that is done the run stays as it is, and the same command continues it."""
    from llm_fed.commands import forget as forgetting

    def agreed(cost: str) -> bool:
        print(printable(cost), file=sys.stderr, flush=True)
        return yes or sys.stdin is None or not sys.stdin.isatty() or typer.confirm("Go on?", err=True)

    if not (lasting := forgetting.forget(run_dir, client, agreed)):
        out.print("nothing was changed")
        return
    out.print(f"{run_dir} is as if {client} had never been there. What this cannot take back, where there is any:")
    for line in lasting:
        out.print(f"  {line}")


@app.command(rich_help_panel="Use a finished run")
def chat(
    run_dir: Annotated[Path | None, typer.Argument(help=f"{RUN} Of a run that goes on: its newest round.")] = None,
    client: Annotated[str | None, typer.Option(help="Start with this client's adapter (default: the first).")] = None,
    base: BaseName = None,
    adapter: AdapterFolder = None,
    template: Template = None,
    dtype: Dtype = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer, in tokens (default: the value saved with the adapter).")
    ] = None,
    sampling: Annotated[
        str | None,
        typer.Option(
            metavar="T[,P]",
            help="Sample with this temperature and, after a comma, top-p, e.g. 0.7,0.9 (default: greedy, as scored).",
        ),
    ] = None,
    system: Annotated[
        str, typer.Option(help="A system prompt for every conversation (default: what the template brings).")
    ] = "",
    allow: Allow = None,
) -> None:
    """Chat with the personal adapters of a run, or with a base model. Type /client NAME, /base, /system TEXT, /reset or
    /quit. If standard input is not a terminal, each line is one prompt."""
    _check_what("chat", run_dir, base, {"--adapter": adapter, "--template": template})
    if base is not None and client is not None:
        raise UserError(f"--client {client} only works with a run folder; with --base, give --adapter DIR")
    # What follows takes seconds, so mistakes are named first.
    from llm_fed.commands import chat as chatting
    from llm_fed.commands.chat import Sampling
    from llm_fed.experiment.rounds import opened

    drawn = None if sampling is None else Sampling.parse(sampling, "--sampling")
    someone = sys.stdin.isatty()
    if someone:
        with suppress(ImportError):  # arrow keys and history, where Python has it
            import readline  # noqa: F401
    with ExitStack() as stack:
        if run_dir is not None:
            begun = chatting.of_run(stack.enter_context(opened(run_dir, everybody=True, latest=True)), client)
        else:
            begun = chatting.of_base(str(base), adapter, template, dtype)
        begun.most, begun.sampling, begun.system = max_new_tokens, drawn, system
        chatting.talk(begun, input if someone else lambda _: input(), shows_help=someone)
