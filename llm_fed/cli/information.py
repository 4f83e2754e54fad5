"""Commands for the start: init, methods, runs, tasks and doctor."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from llm_fed.basics.errors import RunError, UserError, listed
from llm_fed.basics.files import write_result
from llm_fed.cli.printing import Json, out, print_list, print_result, program_name
from llm_fed.cli.program import app


@app.command(rich_help_panel="Get started and look things up")
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
        str | None,
        typer.Option(help="The method (default: local; `llm-fed methods` lists all)."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Changes nothing, as nothing is asked any more.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing configuration.")] = False,
) -> None:
    """Inspect your data and write a commented configuration for it."""
    from llm_fed.commands import init as starting

    path = out_file or Path(f"{Path(data).resolve().name.partition('.')[0]}.yaml")
    if path.exists() and not force:
        raise UserError(f"{path} already exists; give another --out, or --force to overwrite it")
    columns = {"prompt": prompt, "input": input_column, "answer": answer, "client": client}
    given = starting.UserChoices(data, base, {role: name for role, name in columns.items() if name}, clients, method)

    drafted = starting.draft(given, lambda line: print(line, file=sys.stderr, flush=True))
    write_result(path, drafted.text.encode())
    for what, words in drafted.findings.items():
        out.print(f"{what:<11}{words}")
    for warning in drafted.warnings:
        out.print(f"{'warning':<11}{warning}")
    out.print(f"wrote {path}. Next:")
    for line in _next_steps(path, drafted.method, drafted.compared, chats=drafted.answers):
        out.print(f"  {program_name()} {line}")


def _next_steps(path: Path, method: str, compared: Sequence[str], *, chats: bool) -> list[str]:
    """What to do with a new configuration: its comparison, or a run where it has none."""
    config, runs = shlex.quote(str(path)), Path("runs")
    folder = runs / (f"compare-{path.stem}" if compared else path.stem)
    location = shlex.quote(str(folder))
    steps = [f"run {config} --dry-run  # the plan, and the memory that it needs"]
    if compared:
        steps.append(f"compare {config} --out {location}  # {listed(compared)}; --draws 10 gives a verdict")
    else:
        steps.append(f"run {config} --out {location}")
    if chats:
        steps.append(f"chat {shlex.quote(str(folder / f'{method}-seed0')) if compared else location}")
    return steps


@app.command(rich_help_panel="Get started and look things up")
def methods(as_json: Json = False) -> None:
    """List the methods with their papers and settings."""
    from llm_fed.commands.lists import of_methods

    print_list(of_methods(), as_json)


@app.command(rich_help_panel="Get started and look things up")
def runs(as_json: Json = False) -> None:
    """List the configurations and launch files that llm_fed ships. Use one by its name: llm-fed run flan.yaml."""
    from llm_fed.settings import shipped

    print_list(shipped.rows(), as_json)


@app.command(rich_help_panel="Get started and look things up")
def tasks(as_json: Json = False) -> None:
    """List the tasks with their metrics and sources."""
    from llm_fed.commands.lists import of_tasks

    print_list(of_tasks(), as_json)


@app.command(rich_help_panel="Get started and look things up")
def doctor(
    base: Annotated[
        str | None, typer.Option(help="Instead, show what llm_fed can do with this base: a folder or a Hub id.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show this machine's hardware and packages, and test a fused training step and a 4-bit layer."""
    from llm_fed.commands import doctor as checks

    findings = checks.examine() if base is None else checks.known_of(base)
    lines = [f"{'ok  ' if each['ok'] else 'FAIL'} {each['what']}: {each['found']}" for each in findings]
    print_result(findings, lines, as_json)
    if not all(finding["ok"] for finding in findings):
        raise RunError("some checks failed; see the lines marked FAIL")
