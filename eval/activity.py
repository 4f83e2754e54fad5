"""A picture of which client was in which round, and how its update compares with the others' in direction and norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from llm_fed.eval import style

RANGE = 8.0  # of norms, as a multiple and a fraction of the median, beyond which colours do not change
MOST = 20  # clients in the picture, which is as wide as half a page
TICKS = 8  # rounds that are named
ABSENT = "#c4ccd4"  # unlike any colour of a number


@dataclass(frozen=True)
class Updates:
    """The updates of a run; NaN where a client had none."""

    clients: Sequence[str]  # the rows, in their order
    rounds: Sequence[int]  # the columns
    cosines: np.ndarray  # (clients, rounds), with the mean of the other updates of the round
    norms: np.ndarray  # (clients, rounds), over the median of the round
    left_out: int = 0  # clients that are not shown


def updates_of(lines: Sequence[dict[str, Any]]) -> Updates | None:
    """Of the lines of rounds; None where they know of no updates of at least two clients. Of more than MOST clients
    those whose mean cosine is the lowest."""
    known = {line["round"]: line["updates"] for line in lines if line.get("updates")}
    clients = sorted({client for updates in known.values() for client in updates})
    if len(clients) < 2:
        return None
    cosines, norms = (np.full((len(clients), len(known)), np.nan) for _ in range(2))
    for column, updates in enumerate(known.values()):
        middle = median(value[0] for value in updates.values())
        for client, (norm, cosine) in updates.items():
            row = clients.index(client)
            cosines[row, column] = math.nan if cosine is None else cosine
            norms[row, column] = norm / middle if middle else math.nan
    shown = list(range(len(clients)))
    if len(clients) > MOST:
        counts = (~np.isnan(cosines)).sum(1)
        means = np.where(counts > 0, np.nansum(cosines, 1) / np.maximum(counts, 1), np.inf)
        shown = sorted(np.argsort(means, kind="stable")[:MOST].tolist())
    return Updates([clients[row] for row in shown], [*known], cosines[shown], norms[shown], len(clients) - len(shown))


def draw(path: Path, *, updates: Updates) -> Path:
    """The cosines above, the norms below, a row per client and a column per round in both."""
    rows = len(updates.clients)
    figure = Figure(figsize=(5.6, 2 * (1.1 + max(0.2 * rows, 0.8))), layout="constrained", facecolor=style.PAGE)
    panels = (
        (updates.cosines, "cosine with the others", "RdBu", 1.0),
        (np.log2(np.maximum(updates.norms, 1e-12)), "norm over the median", "PuOr", math.log2(RANGE)),
    )
    for place, (values, what, colours, most) in enumerate(panels, 1):
        axes = style.plain_axes(figure, (2, 1, place))
        axes.grid(False)
        axes.set_facecolor(ABSENT)
        edges = np.arange(len(updates.rounds) + 1) - 0.5
        image = axes.pcolormesh(edges, np.arange(rows + 1) - 0.5, np.ma.masked_invalid(values), cmap=colours,
                                vmin=-most, vmax=most)  # fmt: skip
        axes.invert_yaxis()
        axes.set_title(what, loc="left", size="medium", color=style.INK)
        style.name_rows(axes, range(rows), updates.clients)
        shown = range(0, len(updates.rounds), math.ceil(len(updates.rounds) / TICKS))
        axes.set_xticks(shown, [str(updates.rounds[column]) for column in shown])
        axes.tick_params(length=0)
        bar = figure.colorbar(image, ax=axes, aspect=12, pad=0.02, fraction=0.05)
        bar.ax.tick_params(colors=style.INK)
        if place == 2:
            axes.set(xlabel="round")
            powers = (-3, -2, -1, 0, 1, 2, 3)
            bar.set_ticks(powers, labels=[f"{2.0**power:g}×" for power in powers])
        bar.outline.set_visible(False)
    return style.save(figure, path)
