"""How scores spread over the clients of finished runs, and where the first run is better or worse than the others
(FedMoE, Figure 4).

The runs have the same clients with the same data. Each client is scored on its own test split; the scores are those of
summary.json. The upper picture has each run's clients in order of their scores, those below the first run's score
minus another's, client by client. Writes clients.csv and .png into the first RUN's folder analysis, and a table.

    python scripts/figures/clients.py RUN [RUN ...]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import numpy as np
from finished import told_apart
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.eval.style import BLUE, INK, MARKERS, ORANGE, PAGE, PALETTE, plain_axes, save, whole_numbers, with_legend
from llm_fed.runs.reading import read_config
from llm_fed.scoring.scores import Summary, summarize

MAX_LABELS = 24  # more clients than this are numbered, not named


def scores(runs: Mapping[str, Path]) -> dict[str, Summary]:
    """The test scores of each run.

    Raises:
        UserError: a run has none, or the clients of two runs are not the same.
    """
    summaries, first = {}, next(iter(runs.values()))
    for name, run in runs.items():
        record = json.loads((run / "summary.json").read_bytes())["scores"]
        if "clients" not in record:
            raise UserError(f"{run} has no test scores; give runs of a task whose clients have a test split")
        summaries[name] = summarize(record["metric"], record["clients"])
        one, other = read_config(first), read_config(run)
        same = (one.seed, one.task.name, one.task.partition) == (other.seed, other.task.name, other.task.partition)
        if not same or summaries[name].clients.keys() != summaries[next(iter(runs))].clients.keys():
            raise UserError(f"{first} and {run} differ in seed, task or clients; give runs on the same clients' data")
    return summaries


def differences(summaries: Mapping[str, Summary]) -> dict[str, list[float]]:
    """By every run but the first: the first one's score minus this one's, client by client."""
    first, *others = summaries
    return {
        other: [score - summaries[other].clients[client] for client, score in summaries[first].clients.items()]
        for other in others
    }


def draw(path: Path, summaries: Mapping[str, Summary]) -> None:
    gaps, (first, *_) = differences(summaries), summaries
    clients, metric = list(summaries[first].clients), summaries[first].metric
    rows, named = 1 + len(gaps), len(clients) <= MAX_LABELS
    figure = Figure(figsize=(6.2, 2.6 + 1.9 * len(gaps)), layout="constrained", facecolor=PAGE)
    axes = plain_axes(figure, (rows, 1, 1))
    for number, (name, summary) in enumerate(summaries.items()):
        colour, marker = PALETTE[number % len(PALETTE)], MARKERS[number % len(MARKERS)] if named else ""
        values = sorted(summary.clients.values())
        places = range(1, len(values) + 1)
        axes.plot(places, values, marker=marker, color=colour, markersize=3.5, linewidth=1.2,
                  label=f"{name}, mean {summary.mean:.1f}")  # fmt: skip
        axes.axhline(summary.mean, color=colour, linestyle=":", linewidth=1)
    axes.set(xlabel="clients of each run, from the lowest score", ylabel=metric)
    axes.xaxis.set_major_locator(whole_numbers())
    for row, (name, values) in enumerate(gaps.items(), start=2):
        below = plain_axes(figure, (rows, 1, row))
        below.bar(range(len(values)), values, 0.8, color=[BLUE if value >= 0 else ORANGE for value in values])
        below.axhline(0, color=INK, linewidth=0.8)
        higher = sum(value > 0 for value in values) / len(values)
        title = f"{first} minus {name}: {fmean(values):+.1f} on average, above zero for {higher:.0%} of the clients"
        below.set_title(title, fontsize="medium", color=INK, parse_math=False)
        below.set(ylabel="difference")
        below.grid(False, axis="x")
        if not named:
            below.set(xlabel="client")
            below.xaxis.set_major_locator(whole_numbers())
        elif row == rows:
            below.set_xticks(range(len(clients)), clients, rotation=90, parse_math=False)
        else:
            below.set_xticks([])
    with_legend(figure)
    save(figure, path)


def table(summaries: Mapping[str, Summary]) -> Table:
    first, gaps = next(iter(summaries)), differences(summaries)
    shown = Table("run", "mean", "std", "worst half", "best", f"{first}: higher, equal, lower")
    for name, summary in summaries.items():
        counts = [sum(np.sign(gap) == sign for gap in gaps[name]) for sign in (1, 0, -1)] if name in gaps else []
        numbers = (summary.mean, summary.std, summary.worst_half, max(summary.clients.values()))
        shown.add_row(name, *(f"{number:.2f}" for number in numbers), ", ".join(map(str, counts)))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    given = parser.parse_args()
    with plain_errors(parser):
        summaries = scores(told_apart(given.runs))
        clients = next(iter(summaries.values())).clients
        rows = [(client, *(summary.clients[client] for summary in summaries.values())) for client in clients]
        folder = write_rows(given.runs[0] / "analysis" / "clients.csv", ("client", *summaries), rows)
        draw(folder / "clients.png", summaries)
    Console(markup=False, emoji=False).print(table(summaries))


if __name__ == "__main__":
    with lasting_streams():
        main()
