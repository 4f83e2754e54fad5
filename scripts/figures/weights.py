"""What a run weighs for each client: a server's models when it merges them, or a client's models side by side.

- merging weights, those of the round that was scored last, in a finished run the tested one (FedMerge, Figure 4):
  weights.csv and .png; with --rounds those after several rounds beside each other, weights_by_round.csv and .png
  (FedMerge, Figure 7);
- mixture weights that a client's models have for all pictures alike (FedEM): the same;
- gates, which weigh for each picture anew: their weights on each client's test pictures, by client and by class
  (FedMoE, Figures 9 and 10). gates.csv has the mean and the population's standard deviation for each model, client and
  class, of all classes where it names none; gates.png how the first model's weights spread over a client's pictures
  (line: minimum to maximum; bar: quartiles; stroke: median; dot: mean), and their mean by class.

Dashed lines part the clusters of `task.partition.kind: cluster`. The files lie in RUN/analysis.

    python scripts/figures/weights.py RUN
    python scripts/figures/weights.py RUN --rounds 1,5,20
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from finished import Scored, tested
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams
from llm_fed.eval.merges import weights_after
from llm_fed.eval.plots import clusters, plot_weights
from llm_fed.eval.scripting import plain_errors, write_rows
from llm_fed.eval.style import BLUE, GREY, INK, MAX_CELLS, MAX_NAMES, ORANGE, PAGE, SKY, name_rows, plain_axes, save
from llm_fed.runs.records import read_records

Row = tuple[Any, ...]  # client, class or "", pictures, and mean and deviation for each model
MAX_LABELS = 24  # more classes than this are numbered, not named
SIDES = LinearSegmentedColormap.from_list("sides", [ORANGE, "#f5f5f5", BLUE])


def by_client_and_class(scored: Mapping[str, Scored], labels: Sequence[str]) -> list[Row]:
    """Mean and standard deviation of the gate's weights for each client: over all its pictures, then by class."""
    rows: list[Row] = []
    for client, own in scored.items():
        assert own.answer.gate is not None
        gate, classes = own.answer.gate.double().numpy(), np.array([picture.label for picture in own.pictures])
        for label in [None, *np.unique(classes).tolist()]:
            part = gate if label is None else gate[classes == label]
            pairs = np.stack([part.mean(0), part.std(0)], 1).ravel().tolist()
            rows.append((client, "" if label is None else labels[label], len(part), *pairs))
    return rows


def draw_gates(path: Path, scored: Mapping[str, Scored], labels: Sequence[str]) -> None:
    """The first model's weight: its spread for each client, and its mean by client and class (white: no picture)."""
    clients, (model, *others) = list(scored), next(iter(scored.values())).models
    gates = [own.answer.gate[:, 0].numpy() for own in scored.values() if own.answer.gate is not None]
    means = {(client, label): mean for client, label, _, mean, *_ in by_client_and_class(scored, labels) if label}
    shown = np.array([[means.get((client, label), np.nan) for label in labels] for client in clients])
    rows, columns = shown.shape
    height = 2.0 + (0.27 * rows if rows <= MAX_NAMES else 7.0)
    figure = Figure(figsize=(4.6 + min(0.42 * columns, 6.0), height), layout="constrained", facecolor=PAGE)
    left, right = plain_axes(figure, (1, 2, 1)), plain_axes(figure, (1, 2, 2))
    least, first, median, third, most = np.stack([np.quantile(gate, (0, 0.25, 0.5, 0.75, 1)) for gate in gates], 1)
    left.hlines(range(rows), least, most, color=INK, linewidth=0.8)
    left.barh(range(rows), third - first, 0.6, left=first, color=SKY)
    left.plot(median, range(rows), "|", color=BLUE, markersize=7, markeredgewidth=1.6)
    left.plot([gate.mean() for gate in gates], range(rows), "o", color=INK, markersize=3.5)
    left.axvline(1 / (1 + len(others)), color=GREY, linestyle="--", linewidth=1)
    left.set(xlabel=f"weight of “{model}” for a picture (dashed: even)", ylim=(rows - 0.5, -0.5))
    away = max(np.nanmax(np.abs(shown - 0.5)), 0.01)
    image = right.imshow(shown, cmap=SIDES, vmin=0.5 - away, vmax=0.5 + away, aspect="auto", interpolation="nearest")
    right.grid(False)
    right.tick_params(length=0)
    if rows * columns <= MAX_CELLS:
        for (row, column), mean in np.ndenumerate(shown):
            if not np.isnan(mean):
                colour = "#ffffff" if abs(mean - 0.5) > 0.6 * away else "#111111"
                right.text(column, row, f"{mean:.2f}", ha="center", va="center", fontsize=7, color=colour)
    if columns <= MAX_LABELS:
        right.set_xticks(range(columns), labels, rotation=90, parse_math=False)
    else:
        right.set(xlabel="class")
    if rows <= MAX_NAMES:
        name_rows(left, range(rows), clients)
    else:
        left.set(ylabel="client")
    right.set_yticks([])
    groups = clusters(clients) or [""] * rows
    for row in range(1, rows):
        if groups[row] != groups[row - 1]:
            for axes in (left, right):
                axes.axhline(row - 0.5, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    bar = figure.colorbar(image, ax=right, aspect=30, pad=0.02)
    bar.set_label(f"mean weight of “{model}”", color=INK)
    bar.outline.set_visible(False)
    save(figure, path)


def draw_rounds(path: Path, weights_by_round: Mapping[int, Mapping[str, Any]]) -> None:
    """A heat map of merging weights per round, a row per client, on one scale of colours."""
    clients = list(weights_by_round[max(weights_by_round)]["clients"])  # a client has weights from its first answer on
    shown = {}
    for round, weights in weights_by_round.items():
        rows = dict(zip(weights["clients"], weights["values"], strict=True))
        shown[round] = np.array([rows.get(client, np.full(len(weights["values"][0]), np.nan)) for client in clients])
    top = max(float(np.nanmax(values)) for values in shown.values())
    height = 1.6 + (0.27 * len(clients) if len(clients) <= MAX_NAMES else 6.0)
    figure = Figure(figsize=(1.4 + 1.9 * len(shown), height), layout="constrained", facecolor=PAGE)
    groups, drawn = clusters(clients) or [""] * len(clients), []
    for place, (round, values) in enumerate(shown.items(), 1):
        axes = plain_axes(figure, (1, len(shown), place))
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
        axes.grid(False)
        axes.tick_params(length=0)
        axes.set(title=f"after round {round}", xlabel="soup model")
        axes.set_yticks([])
        for row in range(1, len(clients)):
            if groups[row] != groups[row - 1]:
                axes.axhline(row - 0.5, color="#ffffff", linestyle=(0, (4, 3)), linewidth=1)
        drawn.append(axes)
    if len(clients) <= MAX_NAMES:
        name_rows(drawn[0], range(len(clients)), clients)
    else:
        drawn[0].set(ylabel="client")
    figure.colorbar(image, ax=drawn, aspect=30, pad=0.02).set_label("merging weight", color=INK)
    save(figure, path)


def by_round(run: Path, lines: Sequence[Mapping[str, Any]], rounds: Sequence[int]) -> None:
    """weights_by_round.csv and .png of these rounds."""
    weights_by_round = {}
    for round in rounds:
        if not any(line["kind"] == "server" and "weights" in line and line["round"] == round for line in lines):
            raise UserError(f"--rounds {round}: {run} has no merging weights after this round")
        weights_by_round[round] = weights_after(lines, round) or {}
    rows = [
        (round, client, *row)
        for round, weights in weights_by_round.items()
        for client, row in zip(weights["clients"], weights["values"], strict=True)
    ]
    header = ("round", "client", *map(str, range(len(rows[0]) - 2)))
    draw_rounds(
        write_rows(run / "analysis" / "weights_by_round.csv", header, rows) / "weights_by_round.png", weights_by_round
    )


def numbers(words: str) -> list[int]:
    return sorted({int(word) for word in words.split(",")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=numbers, help="rounds of merging weights to show, e.g. 1,5,20")
    given = parser.parse_args()
    run = given.run
    with plain_errors(parser):
        lines = read_records(run / "metrics.jsonl")
        if given.rounds:
            by_round(run, lines, given.rounds)
            return
        scored = [line["round"] for line in lines if line["kind"] == "score"]
        merging = weights_after(lines, scored[-1] if scored else None)
        if merging:
            clients, values = merging["clients"], merging["values"]
            models, words = list(map(str, range(len(values[0])))), {}
        else:
            outcomes, labels = tested(run)
            first = next(iter(outcomes.values()))
            clients, models = list(outcomes), list(first.models)
            if first.answer.gate is not None:
                columns = [word for name in models for word in (name, f"{name} std")]
                rows = by_client_and_class(outcomes, labels)
                folder = write_rows(run / "analysis" / "gates.csv", ("client", "class", "pictures", *columns), rows)
                draw_gates(folder / "gates.png", outcomes, labels)
                return
            if "weights" not in first.state.layout.slices:
                raise UserError(
                    f"{run} weighs nothing: there are neither merging weights in its metrics nor weights or gates in "
                    "its personal models"
                )
            values = [own.state["weights"].tolist() for own in outcomes.values()]
            words = {"what": "mixture weight", "of": "model"}
        rows = [(client, *row) for client, row in zip(clients, values, strict=True)]
        folder = write_rows(run / "analysis" / "weights.csv", ("client", *models), rows)
        plot_weights(folder / "weights.png", clients, values, groups=clusters(clients), **words)


if __name__ == "__main__":
    with lasting_streams():
        main()
