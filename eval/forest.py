"""The forest plot of a verdict: a line per pair of methods, its difference and interval beside zero."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from llm_fed.eval.pairs import MARGIN, MethodPair, MethodPairs
from llm_fed.eval.style import AMBER, BLUE, GREEN, GREY, INK, PAGE, plain_axes, save

# claim -> (colour, marker, in words)
LOOKS = {
    "greater": (BLUE, "D", "claimed: the interval excludes 0"),
    "equal": (GREEN, "s", f"equal to within {MARGIN}"),
    "unresolved": (AMBER, "o", "unresolved"),
    "unknown": (GREY, "x", "not judged: too few draws, or of two kinds"),
}
MAX_LETTERS = 18  # of one name; longer ones are cut


def plot_verdict(path: Path, column: MethodPairs) -> Path:
    """The pairs of a comparison, the largest difference first."""
    common = [pair for pair in column.pairs if pair.difference is not None]
    leading = sorted(common, key=lambda pair: -(pair.difference or 0.0))
    count = len(leading)
    figure = Figure(figsize=(5.5, 1.3 + 0.24 * count), layout="constrained", facecolor=PAGE)
    seen: dict[str, Line2D] = {}
    axes = plain_axes(figure, (1, 1, 1))
    axes.axvline(0, color=INK, linewidth=1)
    for place, pair in enumerate(leading):
        colour, marker, words = LOOKS[pair.claim]
        seen[words] = _draw(axes, pair, place, colour, marker)
    labels = [f"{_short(pair.first)} − {_short(pair.second)}" for pair in leading]
    axes.set_yticks(range(count), labels, parse_math=False, fontsize="small")
    axes.set_ylim(count - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_title("average over the clients", fontsize="medium", color=INK, parse_math=False)
    axes.set_xlabel("difference (points)")
    below = figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=len(seen), frameon=False)
    for text in below.get_texts():
        text.set(color=INK, fontsize="small")
    return save(figure, path)


def _draw(axes: Axes, pair: MethodPair, place: int, colour: str, marker: str) -> Line2D:
    if pair.low is not None and pair.high is not None:
        axes.plot([pair.low, pair.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
    face = "none" if pair.claim == "unresolved" else colour
    (drawn,) = axes.plot(
        [pair.difference], [place], marker, color=colour, markerfacecolor=face, markersize=6, linestyle="none"
    )
    return drawn


def _short(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else name[: MAX_LETTERS - 1] + "…"
