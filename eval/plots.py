"""Pictures of runs: each function takes plain data, writes one file (.png or .svg) and returns its path.

Sizes suit a README and half a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, FixedLocator, FuncFormatter

from llm_fed.eval import style
from llm_fed.eval.pairs import MARGIN, MethodPair, MethodPairs

Curve = tuple[Sequence[int], Sequence[float]]
Band = tuple[Sequence[int], Sequence[float], Sequence[float], Sequence[float]]  # x, curve, bounds
Point = tuple[str, float, float, float | None]  # label, cost, score, standard deviation

# Of a pair of a verdict, by its claim: colour, marker, and what they mean.
LOOKS = {
    "greater": (style.BLUE, "D", "claimed: the interval excludes 0"),
    "equal": (style.GREEN, "s", f"equal to within {MARGIN}"),
    "unresolved": (style.AMBER, "o", "unresolved"),
    "unknown": (style.GREY, "x", "not judged: too few draws, or of two kinds"),
}


def plot_scores(
    path: Path,
    rounds: Sequence[int],
    mean: Sequence[float],
    worst_half: Sequence[float],
    *,
    metric: str,
    split: str = "validation",
    test: tuple[float, float] | None = None,
    references: Mapping[str, float] | None = None,
    after: tuple[str, float] | None = None,
) -> Path:
    """Mean over the clients and over their worst half (0-100) by round, or one curve where one party alone is scored;
    the `test`, (round, mean), as a diamond, and `references` by label as dotted lines. What a method does `after` its
    last round, (in words, mean on the same split), is a star apart, above which the test then stands."""
    figure, axes = style.one_figure(4.8, 3.1)
    alone = list(mean) == list(worst_half)
    axes.plot(rounds, mean, "-o", color=style.BLUE, markersize=3.5, label="score" if alone else "mean")
    if not alone:
        axes.plot(rounds, worst_half, "--s", color=style.ORANGE, markersize=3.5, label="worst half")
    if after:
        apart = rounds[-1] + max(1.0, 0.06 * (rounds[-1] - rounds[0]))
        axes.axvline((rounds[-1] + apart) / 2, color=style.GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot(apart, after[1], "*", color=style.BLUE, markersize=11, label=f"mean after {after[0]}")
        test = (apart, test[1]) if test else None
    if test:
        axes.plot(*test, "D", color=style.GREEN, markersize=7, label="test" if alone else "test mean", clip_on=False)
    for (label, score), colour in zip((references or {}).items(), style.REFERENCES, strict=False):
        axes.axhline(score, color=colour, linestyle=":", linewidth=1.8, label=label)
    axes.set(xlabel="round", ylabel=f"{metric}, {split}")
    style.score_axis(axes.yaxis)
    axes.xaxis.set_major_locator(style.whole_numbers())
    return style.save(style.with_legend(figure), path)


def plot_losses(
    path: Path, clients: Mapping[str, Curve], mean: Curve, *, scored: Curve | None = None, split: str = "validation"
) -> Path:
    """Training loss by round: a curve (rounds, losses) per client, of more than MAX_CURVES clients of every n-th, and a
    thick one for the mean; `scored` is the mean loss of the personal models on the `split`."""
    figure, axes = style.one_figure(4.8, 3.1)
    curves = list(clients.values())[:: 1 + len(clients) // (style.MAX_CURVES + 1)]
    alpha = max(0.15, min(0.7, 8 / max(1, len(curves))))  # many curves: a cloud that leaves the mean visible
    for number, (rounds, losses) in enumerate(curves):
        label = "one client" if number == 0 else None
        axes.plot(rounds, losses, color=style.GREY, linewidth=0.8, alpha=alpha, label=label)
    every = max(1, len(mean[0]) // 12)
    label = "training mean" if scored else "mean"
    axes.plot(*mean, "-o", color=style.BLUE, linewidth=2.2, markersize=3.5, markevery=every, label=label)
    if scored:
        axes.plot(*scored, "--s", color=style.ORANGE, markersize=3.5, label=f"{split} mean")
    axes.set(xlabel="round", ylabel="loss (nats)" if scored else "training loss (nats)")
    axes.xaxis.set_major_locator(style.whole_numbers())
    return style.save(style.with_legend(figure), path)


def plot_bytes(path: Path, rounds: Sequence[int], up: Sequence[int], down: Sequence[int]) -> Path:
    """Bytes on the wire per round, all clients together: to the server above the axis, to clients below."""
    figure, axes = style.one_figure(4.8, 3.1)
    power = min(int(np.log10(max([*up, *down, 1]))) // 3, 4)
    width = 1.0 if len(rounds) > 60 else 0.8
    axes.bar(rounds, np.asarray(up) / 1000**power, width, color=style.BLUE, label="up, to the server")
    axes.bar(rounds, -np.asarray(down) / 1000**power, width, color=style.AMBER, label="down, to the clients")
    axes.axhline(0, color=style.INK, linewidth=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{abs(value):g}"))
    axes.xaxis.set_major_locator(style.whole_numbers())
    axes.set(xlabel="round", ylabel=f"{('bytes', 'kB', 'MB', 'GB', 'TB')[power]} per round")
    return style.save(style.with_legend(figure), path)


def plot_spread(path: Path, coefficients: Mapping[int, Sequence[float]]) -> Path:
    """Merging coefficients by round (Feddle, Figure 6): range, quartiles and median; below, the share of negative
    ones."""
    rounds, values = [*coefficients], [np.asarray(own) for own in coefficients.values()]
    least, first, median, third, most = np.array([np.quantile(own, (0, 0.25, 0.5, 0.75, 1)) for own in values]).T
    figure = Figure(figsize=(4.8, 3.9), layout="constrained", facecolor=style.PAGE)
    upper, lower = style.plain_axes(figure, (2, 1, 1)), style.plain_axes(figure, (2, 1, 2))
    upper.fill_between(rounds, least, most, color=style.BLUE, alpha=0.18, linewidth=0, label="minimum to maximum")
    upper.fill_between(rounds, first, third, color=style.BLUE, alpha=0.4, linewidth=0, label="quartiles")
    upper.plot(rounds, median, color=style.BLUE, linewidth=1.4, label="median")
    upper.axhline(0, color=style.INK, linewidth=0.8)
    upper.set(ylabel="coefficient")
    lower.plot(rounds, [100 * np.mean(own < 0) for own in values], color=style.ORANGE, linewidth=1.4)
    lower.set(xlabel="round", ylabel="negative (%)", ylim=(0, 100))
    lower.sharex(upper)
    lower.xaxis.set_major_locator(style.whole_numbers())
    return style.save(style.with_legend(figure), path)


def plot_bands(path: Path, curves: Mapping[str, Band], *, xlabel: str, ylabel: str) -> Path:
    """A curve per label by round, and the band from its lowest to its highest value."""
    figure, axes = style.one_figure(4.8, 3.1)
    for number, (label, (x, middle, low, high)) in enumerate(curves.items()):
        colour = style.PALETTE[number % len(style.PALETTE)]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        line = ("-" if number < len(style.PALETTE) else "--") + style.MARKERS[number % len(style.MARKERS)]
        axes.plot(x, middle, line, color=colour, markersize=3.5, linewidth=1.4, label=label)
    axes.xaxis.set_major_locator(style.whole_numbers())
    axes.set(xlabel=xlabel, ylabel=ylabel)
    return style.save(style.with_legend(figure), path)


def plot_weights(
    path: Path,
    clients: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    groups: Sequence[str] | None = None,
    title: str | None = None,
    what: str = "merging weight",
    of: str = "soup model",
) -> Path:
    """Heat map of merging `values` (m, d) (FedMerge, Figure 4): a row per client, which sums to 1, a column per soup
    model. Rows of one of the `groups` are drawn together in order of first appearance, white dashes between groups.
    `what` and `of` are the words for a weight and for a column."""
    weights = np.asarray(values, dtype=float)
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups or ()):
        members.setdefault(group, []).append(row)
    if members:
        order = [row for rows_of_group in members.values() for row in rows_of_group]
        clients, weights = [clients[row] for row in order], weights[order]
    rows, columns = weights.shape
    height = max(rows * 0.27, 1.6) if rows <= style.MAX_NAMES else 6.0
    figure, axes = style.one_figure(6.2 if members else 5.4, height + 1.3)
    axes.grid(False)
    # at least twice the uniform weight, so that uniform weights get a middling colour and not the brightest
    top = min(1.0, max(weights.max(), 2 / columns))
    image = axes.imshow(weights, cmap="cividis", vmin=0, vmax=top, aspect="auto", interpolation="nearest")
    axes.set(xlabel=of)
    axes.xaxis.set_major_locator(FixedLocator(range(columns)) if columns <= 20 else style.whole_numbers())
    if rows <= style.MAX_NAMES:
        style.name_rows(axes, range(rows), clients)
    else:
        axes.set(ylabel="client")
    axes.tick_params(length=0)
    if rows * columns <= style.MAX_CELLS and columns <= 12:
        for (row, column), weight in np.ndenumerate(weights):
            colour = "#ffffff" if weight < 0.5 * top else "#111111"
            axes.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=7.5, color=colour)
    if members:
        sizes = np.array([len(rows_of_group) for rows_of_group in members.values()])
        ends = np.cumsum(sizes)
        for end in ends[:-1]:
            axes.axhline(end - 0.5, color="white", linestyle=(0, (4, 3)), linewidth=1.6)
        right = axes.secondary_yaxis("right")
        right.tick_params(length=0, colors=style.INK)
        right.spines["right"].set_visible(False)
        style.name_rows(right, ends - sizes / 2 - 0.5, list(members))
    bar = figure.colorbar(image, ax=axes, orientation="horizontal", aspect=40, pad=0.02, fraction=0.06)
    bar.set_label(f"{what} (uniform: {1 / columns:.3g})", color=style.INK)
    bar.ax.tick_params(colors=style.INK)
    bar.outline.set_visible(False)
    if title:
        axes.set_title(title, parse_math=False, color=style.INK, fontsize="medium")
    return style.save(figure, path)


def clusters(clients: Sequence[str]) -> list[str] | None:
    """The cluster of each client, where ids begin with it as `tasks.partition` names them, or None."""
    names = [client.rpartition("-client")[0] for client in clients]
    return names if all(names) else None


def plot_methods(path: Path, scores: Mapping[str, Mapping[str, Sequence[float]]], *, metric: str) -> Path:
    """Bars per client, one per method, and the mean over the clients (taken per seed) as the last group.
    `scores[method][client]` holds one score (0-100) per seed, for the same clients in every method: the bar is their
    mean, the error bar the standard deviation of the sample (none for one seed)."""
    clients = list(next(iter(scores.values())))
    height = 0.8 / len(scores)
    figure, axes = style.one_figure(6.4, 1.1 + (len(clients) + 1) * (0.12 + 0.11 * len(scores)))
    axes.grid(False, axis="y")
    for number, (method, by_client) in enumerate(scores.items()):
        means = [fmean(values) for values in zip(*by_client.values(), strict=True)]
        groups = [*(by_client[client] for client in clients), means]
        axes.barh(
            [row + (number - (len(scores) - 1) / 2) * height for row in range(len(groups))],
            [fmean(values) for values in groups],
            height,
            xerr=[stdev(values) if len(values) > 1 else np.nan for values in groups],
            color=style.PALETTE[number % len(style.PALETTE)],
            hatch="//" if number >= len(style.PALETTE) else None,
            error_kw={"ecolor": style.INK, "elinewidth": 1, "capsize": 1.5},
            label=method,
        )
    axes.axhline(len(clients) - 0.5, color=style.INK, linewidth=0.8)
    axes.set_ylim(len(clients) + 0.5, -0.5)
    axes.set(xlabel=metric)
    axes.set_xlim(left=0)
    style.score_axis(axes.xaxis)
    style.name_rows(axes, range(len(clients) + 1), [*clients, "mean"])
    return style.save(style.with_legend(figure), path)


def plot_tradeoff(path: Path, series: Mapping[str, Sequence[Point]], *, cost: str, unit: str, metric: str) -> Path:
    """Score against what it costs, e.g. bytes sent (POTARA, Figure 2) or parameters on the server (FedMerge, Figure 5).
    `series[method]` holds (label, cost, score 0-100, its standard deviation or None) per row of a comparison; several
    rows of a method are joined in order of cost, and labelled."""
    figure, axes = style.one_figure(6.0, 3.8)
    for number, (method, points) in enumerate(series.items()):
        ordered = sorted(points, key=lambda point: point[1])
        axes.errorbar(
            [point[1] for point in ordered],
            [point[2] for point in ordered],
            yerr=[np.nan if point[3] is None else point[3] for point in ordered],
            fmt=f"-{style.MARKERS[number % len(style.MARKERS)]}",
            color=style.PALETTE[number % len(style.PALETTE)],
            markersize=6,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=2,
            label=method,
        )
        for label, x, y, _ in ordered if len(ordered) > 1 else ():
            short = label.removeprefix(method).strip() or label
            axes.annotate(
                short, (x, y), (4, 4), textcoords="offset points", fontsize=7, color=style.INK, parse_math=False
            )
    many = EngFormatter(unit=unit, sep=" ") if unit.isalpha() else FuncFormatter(lambda value, _: f"{value:.4g}{unit}")
    axes.xaxis.set_major_formatter(many)
    axes.set(xlabel=cost, ylabel=metric)
    axes.margins(x=0.12)
    style.score_axis(axes.yaxis)
    return style.save(style.with_legend(figure), path)


def plot_mixing(
    path: Path, curves: Mapping[str, Mapping[float, float]], chosen: Mapping[str, float], *, metric: str
) -> Path:
    """Score by mixing weight, an axes per client (POTARA, Figure 4); dashed: the weight that was `chosen`.
    `curves[client]` holds the validation score (0-100) of each weight of the federated adapter."""
    columns = min(4, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.1 * columns + 0.6, 1.7 * rows + 0.6), layout="constrained", facecolor=style.PAGE)
    for number, (client, curve) in enumerate(curves.items()):
        axes = style.plain_axes(figure, (rows, columns, number + 1))
        axes.plot(list(curve), list(curve.values()), "-o", color=style.BLUE, markersize=3)
        if client in chosen:
            axes.axvline(chosen[client], color=style.ORANGE, linestyle="--", linewidth=1.4)
        axes.set_title(style.short(client), fontsize="small", color=style.INK, parse_math=False)
        axes.set_xlim(-0.04, 1.04)
    figure.supxlabel("weight of the federated adapter (dashed: chosen)", fontsize="medium", color=style.INK)
    figure.supylabel(f"{metric}, validation", fontsize="medium", color=style.INK)
    return style.save(figure, path)


def plot_verdict(path: Path, column: MethodPairs) -> Path:
    """The forest plot of a comparison: of each pair of methods the difference with its interval, the largest first."""
    known = [pair for pair in column.pairs if pair.difference is not None]
    leading = sorted(known, key=lambda pair: -(pair.difference or 0.0))
    figure, axes = style.one_figure(5.5, 1.3 + 0.24 * len(leading))
    axes.axvline(0, color=style.INK, linewidth=1)
    seen = {LOOKS[pair.claim][2]: _draw_pair(axes, pair, row) for row, pair in enumerate(leading)}
    labels = [f"{style.short(pair.first, 18)} − {style.short(pair.second, 18)}" for pair in leading]
    axes.set_yticks(range(len(leading)), labels, parse_math=False, fontsize="small")
    axes.set_ylim(len(leading) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_title("average over the clients", fontsize="medium", color=style.INK, parse_math=False)
    axes.set_xlabel("difference (points)")
    below = figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=len(seen), frameon=False)
    for text in below.get_texts():
        text.set(color=style.INK, fontsize="small")
    return style.save(figure, path)


def _draw_pair(axes: Axes, pair: MethodPair, row: int) -> Line2D:
    colour, marker, _ = LOOKS[pair.claim]
    if pair.low is not None and pair.high is not None:
        axes.plot([pair.low, pair.high], [row, row], color=colour, linewidth=2, solid_capstyle="butt")
    face = "none" if pair.claim == "unresolved" else colour
    (drawn,) = axes.plot([pair.difference], [row], marker, color=colour, markerfacecolor=face, markersize=6)
    return drawn
