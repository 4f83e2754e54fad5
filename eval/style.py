"""What all pictures have in common: colours, axes, legends, and how a file is written.

The colours are Okabe and Ito's and cividis, told apart with any colour vision. No pyplot: nothing here changes
matplotlib's state, and no display is needed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axes._secondary_axes import SecondaryAxis
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from llm_fed.basics.files import write_file
from llm_fed.eval.fonts import make_legible

BLUE, AMBER, GREEN, ORANGE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#8C8C8C"
PALETTE = (BLUE, AMBER, GREEN, "#CC79A7", SKY, ORANGE, "#F0E442", GREY)
INK = "#24292f"  # text and axes
REFERENCES = (GREY, "#CC79A7")  # of lines to compare with
MARKERS = "osD^vPX*<>"
PAGE = "#ffffff"
MAX_NAMES = 40  # more rows than this are numbered, not named
MAX_CURVES = 200  # of more clients than this, every n-th is drawn
MAX_CELLS = 160  # more cells than this are not labelled with their values
MAX_LETTERS = 24  # longer names are cut
LEGEND_LINE = 0.22  # inches
MISSING = "Glyph .* missing from"  # how matplotlib warns of a character that a font lacks


def one_figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor=PAGE)
    return figure, plain_axes(figure, (1, 1, 1))


def plain_axes(figure: Figure, place: tuple[int, int, int]) -> Axes:
    axes = figure.add_subplot(*place, facecolor=PAGE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    axes.grid(True, axis="both", color=GREY, alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    return axes


def whole_numbers() -> MaxNLocator:
    return MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1)


def score_axis(axis: Axis) -> None:
    """An axis of scores of 0 to 100, at least two points long: equal scores differ by no hundredth of a point."""
    low, high = axis.get_view_interval()
    high = min(max(high, low + 2), 101)
    axis.set_view_interval(min(low, high - 2), high, ignore=True)
    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 2.5, 5, 10]))


def short(name: str, letters: int = MAX_LETTERS) -> str:
    return name if len(name) <= letters else name[: letters - 1] + "…"


def name_rows(axes: Axes | SecondaryAxis, positions: Sequence[float] | range, names: Sequence[str]) -> None:
    """Names on the y axis as they stand: cut when long, and `$` is no formula."""
    axes.set_yticks(positions, [short(name) for name in names], parse_math=False)


def with_legend(figure: Figure) -> Figure:
    """Above the first axes, in as many of three columns as fit; the figure grows by what is over two lines."""
    axes = figure.axes[0]
    handles, _ = axes.get_legend_handles_labels()
    columns = min(3, len(handles))
    colour = axes.xaxis.label.get_color()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=MISSING, category=UserWarning)  # `save` sees to them
        while True:
            made = figure.legend(loc="outside upper left", ncols=columns, frameon=False, labelcolor=colour)
            if columns <= 1 or made.get_window_extent().width <= figure.bbox.width:
                break
            made.remove()
            columns -= 1
    lines = -(-len(handles) // columns) if handles else 0
    figure.set_figheight(figure.get_figheight() + LEGEND_LINE * max(0, lines - 2))
    return figure


def keep_ticks(figure: Figure) -> None:
    """Fixes the ticks of y axes to those of a first drawing: where a legend is outside, the layout measures others,
    and would cut a label whose ticks' numbers are longer."""
    figure.draw_without_rendering()
    for axes in figure.axes:
        if isinstance(axes.yaxis.get_major_locator(), MaxNLocator):
            low, high = sorted(axes.get_ylim())
            axes.yaxis.set_major_locator(FixedLocator([tick for tick in axes.get_yticks() if low <= tick <= high]))


def save(figure: Figure, path: Path) -> Path:
    """Write the file, the same bytes every time."""
    with mpl.rc_context({"svg.hashsalt": "llm_fed"}), warnings.catch_warnings():
        warnings.filterwarnings("error", message=MISSING, category=UserWarning)
        try:
            drawn = _drawn(figure, path.suffix)
        except UserWarning:  # the usual font lacks a character, which would be drawn as a box
            warnings.filterwarnings("ignore", message=MISSING, category=UserWarning)
            make_legible(figure)
            drawn = _drawn(figure, path.suffix)
    if isinstance(path, Path):
        write_file(path, drawn)
    else:  # it goes into a page
        path.write(drawn)
    return path


def _drawn(figure: Figure, suffix: str) -> bytes:
    keep_ticks(figure)
    file = BytesIO()
    figure.savefig(file, format=suffix[1:], dpi=160, metadata={"Date": None} if suffix == ".svg" else None)
    return file.getvalue()
