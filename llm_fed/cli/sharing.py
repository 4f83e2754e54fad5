"""Commands that hand adapters and federations on: export, push, flower, serve and publish."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich import filesize

from llm_fed.basics.errors import UserError, printable
from llm_fed.cli.printing import RUN, Allow, ConfigFile, RunFolder, Settings, out
from llm_fed.cli.program import app

Clients = Annotated[list[str] | None, typer.Option(help="Only this client; may be repeated.")]


@app.command(rich_help_panel="Share and deploy")
def export(
    run_dir: RunFolder,
    out_dir: Annotated[Path, typer.Argument(help="The folder for the copies, with one folder per client.")],
    client: Clients = None,
    merged: Annotated[
        bool,
        typer.Option("--merged", help="Write whole models, with the adapter merged into the base: no PEFT needed."),
    ] = False,
    gguf: Annotated[
        bool,
        typer.Option(
            "--gguf", help="Also write each adapter for llama.cpp; with --merged, write GGUF models and the base's."
        ),
    ] = False,
    allow: Allow = None,
) -> None:
    """Copy the personal adapters of a run as PEFT folders, and tell on standard error which of them vLLM and LoRAX can
    serve."""
    from llm_fed.commands import evaluate as runs
    from llm_fed.experiment.rounds import opened
    from llm_fed.export import serving

    with opened(run_dir, client or []) as source:
        if merged:
            from llm_fed.export import merged as whole

            plan = whole.plan(source, out_dir, client or [], gguf)
            if plan.note:
                print(printable(plan.note), file=sys.stderr)
            for folder in plan.write():
                out.print(str(folder))
            return
        folders = runs.export(source, out_dir, client or [], gguf)
    for folder in folders:
        out.print(str(folder))
    print(printable(serving.line(folders)), file=sys.stderr)


@app.command(rich_help_panel="Share and deploy")
def push(
    run_dir: RunFolder,
    namespace: Annotated[str, typer.Argument(help="Your user name on the Hub, or an organisation's name.")],
    client: Clients = None,
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
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Push nothing, and ask the Hub nothing: list repositories and files.")
    ] = False,
    allow: Allow = None,
) -> None:
    """Push the personal adapters of a run to the Hub, one PEFT repository per client. A repeated push commits only
    what changed."""
    from llm_fed.experiment.rounds import opened
    from llm_fed.export import hub

    hub.quiet()
    with opened(run_dir, client or []) as source:
        if dry_run:
            for url, files, size in hub.planned(
                source, namespace, clients=client or [], prefix=prefix, one_repository=one_repository
            ):
                out.print(f"would push {url}: {filesize.decimal(size)} in {', '.join(files)}")
            return
        for url, changed in hub.push(
            source, namespace, clients=client or [], private=private, license=license, prefix=prefix,
            one_repository=one_repository,
        ):  # fmt: skip
            out.print(f"{'pushed   ' if changed else 'unchanged'} {url}")


@app.command(rich_help_panel="Share and deploy")
def flower(
    config: ConfigFile,
    settings: Settings = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="The folder of the app (default: apps/<config>-<method>).")
    ] = None,
) -> None:
    """Write a Flower app that runs the federation with its clients on other machines. Each machine needs Flower: in a
    clone, pip install -e '.[flower]'; with the wheel, pip install 'WHEEL[flower]'."""
    from llm_fed.commands import section
    from llm_fed.settings import configfile, shipped

    config = shipped.find(config)
    loaded = configfile.load(config, settings or [])
    section.check(loaded, data=False)
    from llm_fed.network import flower_app, limits  # with torch, so mistakes are named first

    limits.check(flower_app.natural(loaded))
    name = flower_app.name_of(config.stem, str(loaded.method["name"]))
    folder = out_dir or Path("apps") / name
    note = flower_app.write(folder, loaded, name, config)
    out.print(f"wrote {folder}. Next: flwr run {shlex.quote(str(folder))} SUPERLINK --stream{note}")


@app.command(rich_help_panel="Share and deploy")
def serve(
    runs: Annotated[list[str], typer.Argument(help=f"{RUN} Several may be served together.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at; 0: any that is free.")] = 8000,
    host: Annotated[
        str, typer.Option(help="The address to listen at; another one than this machine's needs a key.")
    ] = ("127.0.0.1"),
    api_key: Annotated[
        str, typer.Option(envvar="LLM_FED_API_KEY", help="The key that every request must bring (default: none).")
    ] = "",
    queue: Annotated[int, typer.Option(min=1, help="How many requests may wait for a row of the batch.")] = 64,
    allow: Allow = None,
) -> None:
    """Serve the personal models of runs to the openai package and to chat front ends: each client is a model, and
    whatever they are asked is answered in one batch."""
    if importlib.util.find_spec("fastapi") is None or importlib.util.find_spec("uvicorn") is None:
        raise UserError("llm-fed serve needs FastAPI and uvicorn: pip install 'llm-fed[serve]'")
    from llm_fed.commands import serve as serving  # what follows takes seconds
    from llm_fed.commands.serving import of_runs

    with serving.listening(host, port, api_key) as found:
        serving.run(of_runs(runs, queue), found, api_key)


@app.command(rich_help_panel="Share and deploy")
def publish(
    run_dir: Annotated[str, typer.Argument(help=f"{RUN} Of a run that goes on: its newest round.")],
    vllm: Annotated[str, typer.Option(help="The address of a vLLM server that sees this disk, e.g. http://host:8000.")],
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="The folder for the copies that it loads (default: RUN/published).")
    ] = None,
    api_key: Annotated[str, typer.Option(envvar="VLLM_API_KEY", help="The server's key (default: none).")] = "",
    allow: Allow = None,
) -> None:
    """Load the adapters of a run's newest round into a running vLLM server as CLIENT@ROUND, and unload earlier rounds
    once the new ones answer."""
    from llm_fed.commands.publish import Publisher

    for name in Publisher(run_dir, vllm, out_dir, api_key).publish():
        out.print(name)
