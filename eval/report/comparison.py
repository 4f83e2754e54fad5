"""The page of a comparison: its table, its verdict, its clients and its pictures in one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from llm_fed.basics.documents import Json
from llm_fed.eval.report.clients import Heading, SortableTable
from llm_fed.eval.report.page import size, write_page
from llm_fed.eval.report.pictures import ReportFigure
from llm_fed.eval.tables import COSTS, SUMMARIES, ComparisonRow, MeanAndStd, Table
from llm_fed.eval.verdict import TITLE

Draw = Callable[..., Path]  # of `path`
SHOWN = [column for column in (*SUMMARIES, *COSTS) if column.page]  # columns of the first table

# By the picture's file: its title, and what it means.
PICTURES = {
    "verdict": ("Differences", "Of each pair the difference of the means, and its interval; one without 0 is shown."),
    "score_by_client": (
        "Score by client",
        "Each client's mean score over the seeds under every row, with the standard deviation. The last group is the "
        "mean over the clients.",
    ),
    "score_by_round": (
        "Score by round",
        "The mean over the clients and the seeds in each scored round. The band reaches from the lowest to the highest "
        "seed.",
    ),
    "score_by_bytes": (
        "Score by bytes",
        "What a score costs in uploads. A row that lies higher and further left than another is better and cheaper.",
    ),
    "score_by_parameters": (
        "Score by parameters",
        "What a score costs in memory at the server, in adapters. A row that lies higher and further left than another "
        "is better and smaller.",
    ),
}


def write_comparison(table: Table, path: Path, drawn: Mapping[str, Draw] | None = None) -> Path:
    """Write the page and return its path; `drawn` is what draws its pictures, by names in PICTURES. RunError where the
    disk is full, or the folder cannot be written."""
    verdict = table.verdict
    figures = {
        name: ReportFigure(PICTURES[name][0], *PICTURES[name], draw).embedded() for name, draw in (drawn or {}).items()
    }
    return write_page(
        path,
        "table.html.jinja",
        name=path.resolve().parent.name,
        metric=table.metric,
        seeds=list(table.seeds),
        heads=[column.page for column in SHOWN],
        rows=[_row(table, row, verdict.column.best) for row in table.shown],
        runs=any(len(row.results) != len(table.seeds) for row in table.rows),
        cost_heads=[column.title for column in COSTS],
        cost_lines=[(row.label, [text for text, _ in cells]) for row, cells in table.cells(COSTS) if row.method],
        notes=table.all_notes(),
        clients=_clients(table),
        title=TITLE,
        verdict=verdict.column,
        unequal=table.unequal,
        rule=verdict.of_rules,
        method=verdict.method,
        forest=[figure for name, figure in figures.items() if name == "verdict"],
        plots=[figure for name, figure in figures.items() if name != "verdict"],
    )


def _row(table: Table, row: ComparisonRow, best: Sequence[str]) -> dict[str, Json]:
    """One row of the first table: its scores with whether they are among the best, and its costs."""
    cells: list[Json] = []
    for column in SHOWN:
        value = column.value(row)
        if column in COSTS:
            cells.append(size(value) if row.method and isinstance(value, float) else "–" if row.method else "")
            continue
        mean, std = (value.mean, value.std) if isinstance(value, MeanAndStd) else (None, None)
        cells.append({"mean": mean, "std": std, "best": column.judged and row.label in best})
    runs = f"{len(row.results)} of {len(table.seeds)}" if row.method else ""
    return {"label": row.label, "cells": cells, "runs": runs, "baseline": not row.method}


def _clients(table: Table) -> SortableTable:
    """A row per client, and a column with its mean score over the seeds per row of the comparison."""
    rows = [*(row for rows in table.baselines.values() for row in rows if row.results), *table.rows]

    def mean(id: str) -> Sequence[float | None]:
        return [spread.mean if (spread := row.client(id)) else None for row in rows]

    columns = [Heading(row.label, "score") for row in rows]
    return SortableTable("client", columns, [(id, mean(id)) for id in [*table.clients, *table.unscored]])
