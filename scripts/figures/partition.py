"""Who holds what under a configuration: a picture of the training examples by client and label, a table, the counts.

Clients are rows. Few clients are drawn as circles whose areas are to scale, many as a heat map on a logarithmic scale;
dashed lines part the clusters of `task.partition.kind: cluster`. The labels are those that a partition divides by.
Writes OUT (.png or .svg) and, beside it, a .csv with what each client has of each label in each split.

    python scripts/figures/partition.py CONFIG.yaml key=value ... --out OUT.png
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console
from rich.table import Table

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.eval.style import BLUE, GREY, INK, MAX_LETTERS, MAX_NAMES, PAGE, save
from llm_fed.rows.layout import natural_order
from llm_fed.settings import configfile
from llm_fed.tasks.common import TaskData
from llm_fed.tasks.partition import SPLITS

MAX_CIRCLES = 400  # more cells than this make a heat map
MAX_LABELS = 24  # more columns than this are numbered, not named
SHADES = LinearSegmentedColormap.from_list("shades of blue", ["#d3e6f4", BLUE, "#001a2e"])


def count(data: TaskData) -> tuple[list[str], np.ndarray]:
    """The L labels, and the examples of each client, label and split: (clients, L, 3)."""
    held = [[Counter(e.group for e in getattr(c, split)) for split in SPLITS] for c in data.clients.values()]
    labels = sorted({label for client in held for split in client for label in split}, key=natural_order)
    return labels, np.array([[[split[label] for split in client] for label in labels] for client in held])


def named(labels: list[str], data: TaskData) -> list[str]:
    """The labels, by the names of the classes where they are their numbers."""
    names = {str(number): name for number, name in enumerate(data.labels)}
    return [names[label] for label in labels] if set(labels) <= set(names) else [label or "none" for label in labels]


def borders(clients: list[str]) -> list[int]:
    """The rows with which another cluster begins; none where ids say of no cluster."""
    clusters = [client.rpartition("-client")[0] for client in clients]
    return [row for row, (above, below) in enumerate(pairwise(clusters), start=1) if above != below]


def draw(path: Path, clients: list[str], labels: list[str], held: np.ndarray) -> None:
    """The training examples of each client and label, `held` (clients, labels)."""
    rows, columns = held.shape
    circles = rows <= MAX_NAMES and rows * columns <= MAX_CIRCLES
    width, height = (1.6 + 0.36 * columns, 1.2 + 0.36 * rows) if circles else (6.2, min(1.8 + 0.13 * rows, 7.0))
    figure = Figure(figsize=(max(width, 3.6), max(height, 2.6)), layout="constrained", facecolor=PAGE)
    axes = figure.add_subplot(facecolor=PAGE)
    if circles:
        _circles(axes, held)
    else:
        shown = np.where(held, held, np.nan)
        image = axes.imshow(
            shown, cmap=SHADES, norm=LogNorm(1, max(held.max(), 2)), aspect="auto", interpolation="none"
        )
        bar = figure.colorbar(image, ax=axes, aspect=40, pad=0.02, ticks=LogLocator(subs=(1, 2, 5)), format="{x:g}")
        bar.ax.minorticks_off()
        bar.ax.tick_params(colors=INK)
        bar.set_label("training examples (white: none)", color=INK)
        bar.outline.set_visible(False)
    for row in borders(clients):
        axes.axhline(row - 0.5, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    axes.spines[:].set_color(GREY)
    axes.tick_params(length=0, colors=INK)
    if rows <= MAX_NAMES:
        axes.set_yticks(range(rows), [_short(name) for name in clients], parse_math=False)
    else:
        axes.set_ylabel("client", color=INK)
    if columns <= MAX_LABELS:
        axes.set_xticks(range(columns), [_short(name) for name in labels], rotation=90, parse_math=False)
    else:
        axes.set_xlabel("label", color=INK)
    save(figure, path)


def _circles(axes: Axes, held: np.ndarray) -> None:
    """Areas in proportion to the counts; the largest fills its cell of 0.36 inches."""
    rows, columns = np.nonzero(held)
    largest = (0.36 * 72 * 0.9) ** 2  # points squared
    axes.scatter(columns, rows, s=largest * held[rows, columns] / held.max(), color=BLUE, linewidth=0)
    axes.set(xlim=(-0.6, held.shape[1] - 0.4), ylim=(held.shape[0] - 0.4, -0.6), aspect="equal")
    axes.set_title(f"largest: {held.max()} training examples", color=INK, fontsize="medium")
    axes.grid(True, color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)


def _short(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else name[: MAX_LETTERS - 1] + "…"


def summary(held: np.ndarray) -> Table:
    """Least, median and most of the clients, from (clients, labels, splits)."""
    table = Table("of a client", "least", "median", "most", title=f"{len(held)} clients, {held.shape[1]} labels")
    rows = {f"{split} examples": held[:, :, place].sum(1) for place, split in enumerate(SPLITS)}
    for name, values in {**rows, "labels it trains on": (held[:, :, 0] > 0).sum(1)}.items():
        table.add_row(name, str(values.min()), f"{np.median(values):g}", str(values.max()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("words", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_intermixed_args()
    with plain_errors(parser):
        if given.out.suffix not in (".png", ".svg"):
            raise UserError(f"--out {given.out}: pictures are .png or .svg; give such a name")
        config = configfile.load(given.config, given.words)
        data = tasks.load(config.task, config.federation_seed, config.evaluation_seed)
        labels, held = count(data)
        names = named(labels, data)
        counts = [
            (client, names[label], *held[row, label].tolist())
            for row, client in enumerate(data.clients)
            for label in np.flatnonzero(held[row].sum(1))
        ]
        write_rows(given.out.with_suffix(".csv"), ("client", "label", *SPLITS), counts)
        draw(given.out, list(data.clients), names, held[:, :, 0])
    Console(markup=False, emoji=False).print(summary(held))


if __name__ == "__main__":
    with lasting_streams():
        main()
