"""Commands that merge adapters: merge and join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llm_fed.basics.errors import UserError
from llm_fed.cli.printing import TEMPLATE, Allow, Json, Settings, out, print_result, print_scores, words_of
from llm_fed.cli.program import app


@app.command(rich_help_panel="Merge")
def merge(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FOLDER... | METHOD [KEY=VALUE...]",
            help="PEFT folders to merge by --method; or the method that merges --fed with --local (potara, fisher, "
            "grid, ties, ...; `llm-fed methods` lists them), and its settings, e.g. method.samples=30.",
        ),
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="The folder for the merged adapter, or for one per client.")],
    method: Annotated[
        str | None, typer.Option(help="Of folders: linear, svd, ties, dare, karcher, or for two of them slerp.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of folders: a weight for each, such as 0.5,0.3,0.2 (default: all the same).")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="For svd, ties and dare: the rank of the merge.")] = None,
    density: Annotated[float | None, typer.Option(max=1, help="For ties: the share of entries kept (0.2).")] = None,
    drop: Annotated[float | None, typer.Option(min=0, help="For dare: the share of entries dropped (0.5).")] = None,
    fed: Annotated[
        str | None, typer.Option(help="The federated adapter: a run, RUN@ROUND, RUN@best, or a PEFT folder.")
    ] = None,
    local: Annotated[
        str | None, typer.Option(help="The local adapter: a run, RUN@ROUND, RUN@best, or a PEFT folder.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="For PEFT folders: the task whose examples are used; needs --client.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="For PEFT folders: a file of examples, or the local data of --task.")
    ] = None,
    client: Annotated[str | None, typer.Option(help="With --fed: merge only this client's adapters.")] = None,
    base: Annotated[str | None, typer.Option(help="The base model (default: the one that the adapters name).")] = None,
    template: Annotated[
        str | None, typer.Option(help=f"As for eval, {TEMPLATE} (default: the one saved with the adapters).")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="For PEFT folders: the base's float32, bfloat16, float16 or auto (default: as in training)."),
    ] = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Merge any number of PEFT folders into one; or a federated and a local adapter at each client, by examples too:
    POTARA, Fisher merging, task arithmetic, TIES, DARE, SLERP, mean, grid."""
    options = {"rank": rank, "density": density, "drop": drop}
    given = {name: value for name, value in options.items() if value is not None}
    both = fed is not None and local is not None
    if not both and (fed or local or client or task):
        raise UserError("--fed and --local name the two parents, at whose --client; give both")
    if both and (method or weights or given):
        raise UserError(
            "--method, --weights, --rank, --density and --drop are of folders alone; leave out --fed, --local"
        )
    from llm_fed.settings import configfile

    configfile.keys_of(words[1:] if both else [], "the method")  # what follows takes seconds, so mistakes come first

    about = words_of({"task.name": task, "task.path": data, "task.template": template, "base.dtype": dtype})
    if fed is not None and local is not None:
        _parents(words[0], [*words[1:], *about], fed, local, base, out_dir, client, as_json)
    else:
        scored = about if data else []
        _several([Path(word) for word in words], method or "linear", out_dir, weights, given, base, scored, as_json)


def _several(
    folders: list[Path], method: str, out_dir: Path, weights: str | None, given: dict[str, int | float],
    base: str | None, scored: list[str], as_json: bool,
) -> None:  # fmt: skip
    from llm_fed.commands.merge_folders import merge_folders

    try:
        shares = [float(each) for each in weights.split(",")] if weights else None
    except ValueError as error:
        raise UserError(f"--weights is {weights!r}; it must be numbers with commas, such as 0.5,0.3,0.2") from error
    recipe, scores = merge_folders(folders, method, out_dir, weights=shares, settings=given, base=base, scored=scored)
    lost = f"; {recipe['lost']:.1%} of it is cut off by the rank" if "lost" in recipe else ""
    lines = [f"{score:8.2f}  {folder}" for folder, score in scores.items()]
    lines.append(f"wrote the merge of {len(folders)} adapters by {method} to {out_dir}{lost}")
    print_result({"folder": str(out_dir), **recipe, "scores": scores}, lines, as_json)


def _parents(
    method: str, settings: list[str], fed: str, local: str, base: str | None, out_dir: Path, client: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    from llm_fed.commands import merge as merging
    from llm_fed.eval.merges import for_terminal

    recipes = merging.merge_adapters(method, fed, local, out_dir, base=base, client=client, words=settings)
    scores = merging.scores_in(out_dir)
    if as_json:
        clients = {client: {"folder": str(out_dir / client), **recipe} for client, recipe in recipes.items()}
        print(json.dumps({"method": method, "clients": clients} | ({"scores": scores} if scores else {})))
        return
    for table in for_terminal(recipes):
        out.print(table)
    for client, recipe in recipes.items():
        if "note" in recipe:
            out.print(f"{client}: {recipe['note']}")
    if scores and "clients" in scores:
        print_scores({method: scores})
    out.print(f"wrote one PEFT folder per client to {out_dir}")


@app.command(rich_help_panel="Merge")
def join(
    run_dir: Annotated[Path, typer.Argument(help="The folder of a finished run, whose adapters are merged.")],
    data: Annotated[
        Path, typer.Option(help="The new client's examples: a file in the same form as those of the run's clients.")
    ],
    out_dir: Annotated[Path, typer.Option("--out", help="The PEFT folder to write.")],
    settings: Settings = None,
    examples: Annotated[
        int, typer.Option(min=1, help="How many examples, drawn at random, the merging weights are fitted to, at most.")
    ] = 16,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Then fine-tune for N steps on all examples (default: no fine-tuning).")
    ] = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Make a personal adapter for a client that took no part in a run, in seconds: merge the run's adapters with
    weights fitted to the client's examples."""
    from llm_fed.settings import configfile

    configfile.keys_of(settings or [], "the run folder")  # what follows takes seconds, so mistakes are named first
    from llm_fed.commands import join as joining

    recipe = joining.join(run_dir, data, out_dir, examples=examples, steps=steps, words=settings or [])
    lines = [*joining.for_terminal(recipe), f"the PEFT folder is {out_dir}"]
    print_result({"folder": str(out_dir), **recipe}, lines, as_json)
