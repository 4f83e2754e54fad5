"""The page of a comparison: its table, its clients and its pictures in one HTML file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_fed.eval.report.clients import Column, SortableTable
from llm_fed.eval.report.page import write_page
from llm_fed.eval.tables import Table

# By the picture's file: its title, and what it means.
PICTURES = {
    "verdict": (
        "Verdict",
        "The difference of each pair of rows with its interval. Where the interval does not reach the line at 0, the "
        "difference is shown; else it is unresolved.",
    ),
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


def write_comparison(table: Table, path: Path) -> Path:
    """Write the page and return its path; `table.pictures` are part of it.

    Raises:
        RunError: the disk is full, or the folder cannot be written.
    """
    return write_page(
        path,
        "table.html.jinja",
        name=path.resolve().parent.name,
        metric=table.metric,
        seeds=list(table.seeds),
        heads=table.heads,
        lines=table.cells(),
        notes=table.all_notes(),
        clients=_clients(table),
        verdict=[
            {"title": table.verdict.title(key), "headline": column.headline, "pairs": list(map(str, column.pairs))}
            for key, column in table.verdict.columns.items()
        ],
        rule=table.verdict.of_rules,
        method=[*table.verdict.variance, *table.verdict.method],
        pictures=[_picture(picture) for picture in table.pictures],
    )


def _clients(table: Table) -> SortableTable:
    """A row per client, and a column with its mean score over the seeds per row of the comparison."""
    rows = [*(row for rows in table.baselines.values() for row in rows if row.results), *table.rows]

    def mean(id: str) -> Sequence[float | None]:
        return [spread.mean if (spread := row.client(id)) else None for row in rows]

    columns = [Column(row.label, "score") for row in rows]
    return SortableTable("client", columns, [(id, mean(id)) for id in [*table.clients, *table.unscored]])


def _picture(path: Path) -> dict[str, Any]:
    """For the template; a comparison's pictures are light ones, on a dark page too."""
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    title, about = PICTURES[path.stem]
    return {"title": title, "alt": title, "about": about, "light": uri, "dark": uri}
