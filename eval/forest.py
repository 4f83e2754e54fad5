"""The forest plot of a verdict: a line per pair of methods, its difference and interval beside zero."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from llm_fed.eval.pairs import MARGIN, MethodPairs, Pair
from llm_fed.eval.style import AMBER, BLUE, GREEN, GREY, INK, PAGE, plain_axes, save

# claim -> (colour, marker, in words)
LOOKS = {
    "greater": (BLUE, "D", "claimed: the interval excludes 0"),
    "equal": (GREEN, "s", f"equal to within {MARGIN}"),
    "unresolved": (AMBER, "o", "unresolved"),
    "unknown": (GREY, "x", "too few draws for an interval"),
}
MAX_LETTERS = 18  # of one name; longer ones are cut


def plot_verdict(path: Path, columns: Sequence[tuple[str, MethodPairs]], *, dark: bool = False) -> Path:
    """Axes per quantity (title, column), with the same pairs in each, by their difference in the first."""
    pairs_by_column = [{frozenset((pair.first, pair.second)): pair for pair in column.pairs} for _, column in columns]
    leading = sorted(columns[0][1].pairs, key=lambda pair: -(pair.difference or 0.0))
    count = len(leading)
    figure = Figure(figsize=(2.6 + 2.9 * len(columns), 1.3 + 0.24 * count), layout="constrained", facecolor=PAGE[dark])
    seen: dict[str, Line2D] = {}
    for number, ((title, _), pairs) in enumerate(zip(columns, pairs_by_column, strict=True)):
        axes = plain_axes(figure, (1, len(columns), number + 1), dark)
        axes.axvline(0, color=INK[dark], linewidth=1)
        for place, named in enumerate(leading):
            pair = pairs.get(frozenset((named.first, named.second)))
            if pair is None or pair.difference is None:
                continue
            colour, marker, words = LOOKS[pair.claim]
            sign = 1 if pair.first == named.first else -1
            seen[words] = _draw(axes, pair, sign, place, colour, marker)
        labels = [f"{_short(pair.first)} − {_short(pair.second)}" for pair in leading] if not number else [""] * count
        axes.set_yticks(range(count), labels, parse_math=False, fontsize="small")
        axes.set_ylim(count - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.set_title(title, fontsize="medium", color=INK[dark], parse_math=False)
        axes.set_xlabel("difference (points)")
    below = figure.legend(list(seen.values()), list(seen), loc="outside lower center", ncols=len(seen), frameon=False)
    for text in below.get_texts():
        text.set(color=INK[dark], fontsize="small")
    return save(figure, path)


def _draw(axes: Axes, pair: Pair, sign: int, place: int, colour: str, marker: str) -> Line2D:
    assert pair.difference is not None
    centre = sign * pair.difference
    if pair.low is not None and pair.high is not None:
        axes.plot([sign * pair.low, sign * pair.high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
    face = "none" if pair.claim == "unresolved" else colour
    (drawn,) = axes.plot([centre], [place], marker, color=colour, markerfacecolor=face, markersize=6, linestyle="none")
    return drawn


def _short(name: str) -> str:
    return name if len(name) <= MAX_LETTERS else name[: MAX_LETTERS - 1] + "…"
