"""What merges found out: the weights with which a server merges its models and the coefficients that it searched
(`Method.report`), and by client what a merge at the end says (`Method.recipe`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from llm_fed.basics.terminal import table_of_numbers

Recipes = Mapping[str, Mapping[str, Any]]  # by client

_NUMBERS = {  # key of a recipe -> title of a column
    "lambda_fed": "weight of fed",
    "fed_share": "share of fed",
    "a": "a (fed)",
    "b": "b (local)",
    "c": "c (cross)",
    "distance": "distance",
}
_ABOUT = {
    "weights": "The weight of fed (lambda) is the share of the federated adapter in a client's personal one, between 0 "
    "and 1; the rest is its local adapter. Where it is near 1 the client's own training adds little.",
    "sweep": "The same weight under stronger and weaker damping of the Fisher information. Where a row hardly changes, "
    "the weight does not hang on that choice.",
    "grid": "The score on the client's validation examples with each weight tried. It shows how much was to be gained "
    "from the right weight, and which that was.",
}


@dataclass(frozen=True)
class Tabulated:
    """A table as text."""

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]  # by client
    about: str  # what it means


def weights_after(lines: Iterable[Mapping[str, Any]], round: int | None) -> Mapping[str, Any] | None:
    """The last merging weights in the lines of a metrics.jsonl up to `round` (None: of all), those that made the models
    of that round: `clients`, and `values` with a row for each. None where nothing was merged with weights."""
    weights = None
    for line in lines:
        if line["kind"] == "server" and (round is None or line["round"] <= round):
            weights = line.get("weights", weights)
    return weights


def coefficients(lines: Iterable[Mapping[str, Any]]) -> dict[int, list[float]]:
    """By round those of the `server` lines of a metrics.jsonl, one per stored update; a run without a search has
    none."""
    return {line["round"]: line["coefficients"] for line in lines if line.get("coefficients")}


def tabulate(recipes: Recipes) -> list[Tabulated]:
    """The weights and traces, the weight by damping, and the validation score by weight, as far as there are such."""
    tables = [_table("merging weights", recipes, _NUMBERS, _ABOUT["weights"])]
    for key, title in (("sweep", "weight of fed, by damping"), ("grid", "validation score, by weight of fed")):
        if rows := {client: _by_column(recipe[key]) for client, recipe in recipes.items() if key in recipe}:
            tables.append(_table(title, rows, {column: column for column in next(iter(rows.values()))}, _ABOUT[key]))
    return tables


def for_terminal(recipes: Recipes) -> list[Table]:
    tables = []
    for made in tabulate(recipes):
        table = table_of_numbers(made.title, "client", made.columns)
        for client, cells in made.rows.items():
            table.add_row(client, *cells)
        tables.append(table)
    return tables


def curves(recipes: Recipes) -> tuple[dict[str, dict[float, float]], dict[str, float]]:
    """By client the score of each weight, and the weight that was chosen (unless one per factor), as far as there is a
    grid."""
    scores, chosen = {}, {}
    for client, recipe in recipes.items():
        if "grid" in recipe:
            scores[client] = {float(weight): score for weight, score in recipe["grid"].items()}
            if not isinstance(recipe["lambda_fed"], Mapping):
                chosen[client] = recipe["lambda_fed"]
    return scores, chosen


def draw_curves(recipes: Recipes, metric: str, path: Path) -> None:
    from llm_fed.eval.plots import plot_mixing  # with matplotlib, which a run that merges needs only at its end

    scores, chosen = curves(recipes)
    if scores:
        plot_mixing(path, scores, chosen, metric=metric)


def _by_column(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """{factor: {column: number}} turned into {column: {factor: number}}; {column: number} as it is."""
    first = next(iter(values.values()))
    if isinstance(first, Mapping):
        return {column: {factor: row[column] for factor, row in values.items()} for column in first}
    return values


def _table(title: str, rows: Recipes, titles: Mapping[str, str], about: str) -> Tabulated:
    shown = [key for key in titles if any(key in row for row in rows.values())]
    cells = {client: tuple(_number(row.get(key)) for key in shown) for client, row in rows.items()}
    return Tabulated(title, tuple(titles[key] for key in shown), cells, about)


def _number(value: float | Mapping[str, float] | None) -> str:
    """A number, one for A, B and a head, or a dash (nothing, or infinite)."""
    if isinstance(value, Mapping):
        return ", ".join(f"{factor.removeprefix('lora_')} {_number(item)}" for factor, item in value.items())
    return "–" if value is None else f"{value:.3g}"
