"""What commands share in what they print."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from llm_fed.basics.errors import listed
from llm_fed.basics.terminal import Terminal, table_of_numbers
from llm_fed.scoring.scores import NOT_SCORED, not_defined, reads_texts, with_range
from llm_fed.settings import plugins
from llm_fed.settings.config import Config

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


def _allow(context: typer.Context, names: list[str] | None) -> list[str] | None:
    context.with_resource(plugins.allowing(names or ()))
    return names


Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="NAME", callback=_allow,
        help="Let the run folder name this method or task (MODULE:NAME), or bring this chat template or base, which "
        "runs their code; may be repeated.",
    ),
]  # fmt: skip
RUN = "The folder of a finished run; RUN@ROUND and RUN@best are a round that any run has kept, and its best one."
RunFolder = Annotated[Path, typer.Argument(help=RUN)]
ConfigFile = Annotated[Path, typer.Argument(help="A YAML file: yours, or one that `llm-fed runs` lists.")]
Settings = Annotated[
    list[str] | None, typer.Argument(help="key=value settings over those of CONFIG or RUN, e.g. task.max_length=256.")
]
TEMPLATE = r"the prompt template by name, or a text with {prompt} in it, in which \n is a line break"
FEW = 20  # of so many clients each has a row
LOWEST = 5  # clients with the lowest scores that are named where not all are
out = Terminal()


def beside_baselines(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The scores of runs on the same data by name, after those of the base alone and of the best rule that trains
    nothing; of texts these are empty where the runs have not scored them."""
    metric = next((result["scores"]["metric"] for result in results.values() if "metric" in result["scores"]), None)
    text = metric is not None and reads_texts(metric)
    baselines: dict[str, dict[str, Any]] = {
        kind: next((result[kind] for result in results.values() if kind in result), {}) for kind in ("base", "rule")
    }
    known = {kind: line for kind, line in baselines.items() if line or text}
    return known | {name: result["scores"] for name, result in results.items()}


def words_of(options: Mapping[str, object]) -> list[str]:
    """The settings that options stand for, those that are given."""
    return [f"{key}={value}" for key, value in options.items() if value is not None]


def program_name() -> str:
    """How to call this program from here: by its name, or where it is not on the path by its file."""
    beside = Path(sys.executable).with_name("llm-fed")
    return "llm-fed" if shutil.which("llm-fed") or not beside.exists() else shlex.quote(os.path.relpath(beside))


def print_result(value: object, lines: Iterable[str], as_json: bool) -> None:
    """A result, as JSON where that is requested, else in lines."""
    if as_json:
        print(json.dumps(value))
        return
    for line in lines:
        out.print(line)


def print_scores(scores: dict[str, dict[str, Any]]) -> None:
    """A row per client and a column per method (or metric), base and rule; then which rules these are, and which
    methods are below them."""
    known = {name: score for name, score in scores.items() if "clients" in score}
    undefined = dict.fromkeys(client for score in scores.values() for client in score.get("undefined", ()))
    if not known:
        none = "There are no scores, because no client has test examples."
        out.print(not_defined("the metric", [*undefined]) if undefined else none)
        return
    last = next(reversed(known.values()))
    shown = {name: score for name, score in scores.items() if name in known or not score}
    scored = dict.fromkeys(client for score in known.values() for client in score["clients"])
    unscored = dict.fromkeys(client for score in known.values() for client in score.get("unscored", ()))
    many = len(scored) > FEW
    table = table_of_numbers(with_range(last["metric"]), f"{len(scored)} clients" if many else "client", [*shown])
    for client in (*scored, *(client for client in unscored if client not in scored)) if not many else ():
        table.add_row(client, *(_number(score.get("clients", {}).get(client)) for score in shown.values()))
    if len(scored) > 1:
        table.add_section()
        for key, label in (("mean", "mean"), ("std", "std over clients"), ("worst_half", "worst half")):
            table.add_row(label, *(_number(score.get(key)) for score in shown.values()))
    if beside := dict.fromkeys(what for score in shown.values() for what in score.get("beside", {})):
        table.add_section()
        for what in beside:
            means = (score.get("beside", {}).get(what, {}).get("mean") for score in shown.values())
            table.add_row(what, *("-" if mean is None else f"{mean:.4g}" for mean in means))
    out.print(table)
    for name, score in known.items() if many else ():
        if name not in ("base", "rule"):
            lowest = sorted(score["clients"].items(), key=lambda item: item[1])[:LOWEST]
            out.print(f"lowest of {name}: " + ", ".join(f"{client} {number:.1f}" for client, number in lowest))
    if without := [client for client in unscored if client not in undefined]:
        out.print(f"{NOT_SCORED} So it is for {listed(without)}." if many else NOT_SCORED)
    if undefined:
        out.print(not_defined(last["metric"], [*undefined]))
    for line in about_rule(known):
        out.print(line)


def print_warnings(result: Mapping[str, Any]) -> None:
    """What is wrong with a run, and what was not looked at, as its summary says."""
    for warned in result.get("warnings", ()):
        out.print(f"warning: {warned['text']}", style="yellow")
    for text in result.get("unchecked", ()):
        out.print(text)


def about_rule(scores: dict[str, dict[str, Any]]) -> list[str]:
    """Which rules the column `rule` has, and which methods have a lower mean; nothing without that column."""
    if "rule" not in scores:
        return []
    from llm_fed.scoring.rules import describe  # with torch, which mistakes are named without

    rule = scores["rule"]
    lines = [f"rule: the best rule that trains nothing, chosen on the training examples: {describe(rule)}"]
    methods = {name: score["mean"] for name, score in scores.items() if name not in ("base", "rule")}
    if below := [name for name, mean in methods.items() if mean < rule["mean"]]:
        which = "every method" if len(below) == len(methods) > 1 else " and ".join(below)
        lines.append(f"below rule in the mean: {which}; a rule that trains nothing answers these examples better")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def print_cross(folder: Path | None, cross: dict[str, Any], as_json: bool) -> None:
    """A row per client's model and a column per client, of few clients; where all of them are in any case: in the
    run's folder, unless they are of a round of it."""
    if as_json:
        print(json.dumps(cross))
        return
    if len(cross["clients"]) <= 8:  # more are too wide for a terminal
        table = table_of_numbers(with_range(cross["metric"]), "model of", cross["clients"])
        for client, row in zip(cross["clients"], cross["scores"], strict=True):
            table.add_row(client, *map(_number, row))
        if "base" in cross:
            table.add_section()
            table.add_row("the base alone", *map(_number, cross["base"]))
        out.print(table)
    print_warnings(cross)
    if left := cross.get("unscored"):
        out.print(f"without examples, so not in the table: {listed(left)}")
    if folder:
        out.print(f"the whole table is in {folder / 'cross.json'} and {folder / 'report.html'}")
    elif len(cross["clients"]) > 8:
        out.print("the table is too wide for a terminal; --json prints it")


def print_examples(config: Config, folder: Path, most: int, *, fresh: bool, as_json: bool) -> None:
    """The first examples of each client, with what is trained between marks, and in colour where there is one."""
    from llm_fed.experiment.shown import shown  # takes seconds, so mistakes are named first

    examples = shown(config, folder, most, fresh=fresh)
    if as_json:
        print(json.dumps(examples.as_json()))
        return
    for text, target in examples.for_terminal():
        out.print(text, style="bold green" if target else None, end="")


def print_list(entries: list[dict[str, Any]], as_json: bool) -> None:
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
