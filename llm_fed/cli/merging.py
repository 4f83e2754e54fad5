"""Commands that merge adapters: merge and join."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from llm_fed.cli.printing import TEMPLATE, Allow, Json, out
from llm_fed.cli.program import app


@app.command(rich_help_panel="Merge")
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
        str | None, typer.Option(help=f"As for eval, {TEMPLATE} (default: the one saved with the adapters).")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="For PEFT folders: the base's float32, bfloat16, float16 or auto (default: as in training)."),
    ] = None,
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
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Merge a federated and a local adapter: POTARA, Fisher merging, task arithmetic, TIES, DARE, SLERP, mean, grid."""
    from llm_fed.settings import configfile

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
        posthoc.Parents(fed, local, base), out_dir, data=posthoc.EvaluationData(task, data, template, dtype),
        client=client, words=settings or [],
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


@app.command(rich_help_panel="Merge")
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
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Make a personal adapter for a client that took no part in a run, in seconds: merge the run's adapters with
    weights fitted to the client's examples."""
    from llm_fed.settings import configfile

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
