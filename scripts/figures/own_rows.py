"""Draws docs/images/own_rows.svg: scores over the number of a client's own training rows, from docs/results/rows.

One file serves light and dark pages: its style sheet asks which of the two the reader prefers.

    python scripts/figures/own_rows.py docs/images/own_rows.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from llm_fed.runs.records import read_records

FOLDER = Path(__file__).parents[2] / "docs/results/rows"
BASE = "SmolLM2-135M-Instruct"
SIZES = (8, 32, 72)  # own training rows of a client
ROWS = {
    "base": "the model without training",
    "rule": "the best answer without a model",
    "local": "each client alone",
    "fedit": "one adapter for all (federated averaging)",
    "fedmerge": "each client gets a mixture of four adapters",
    "pooled": "control: all rows in one place",
}
WIDTH, LEFT, RIGHT, TOP, HEIGHT, STEP = 560, 34, 528, 62, 230, 19  # pixels; STEP from line to line of the legend
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2933; } .small { font-size: 12px; fill: #52606d; }
  .title { font-size: 16px; font-weight: 600; } .grid { stroke: #d5dbe0; } path { fill: none; stroke-width: 2.5; }
  .base { stroke: #b0bcc6; fill: #b0bcc6; }
  .rule { stroke: #8a9ba8; fill: #8a9ba8; stroke-dasharray: 3 4; }
  .local { stroke: #c2571a; fill: #c2571a; }
  .fedit { stroke: #1f6fb2; fill: #1f6fb2; } .fedmerge { stroke: #00897b; fill: #00897b; }
  .pooled { stroke: #7b5ea7; fill: #7b5ea7; stroke-dasharray: 7 4; } path { fill: none; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; } .small { fill: #9fb3c8; } .grid { stroke: #3b4754; }
    .local { stroke: #f08a4b; fill: #f08a4b; }
    .fedit { stroke: #63a9e6; fill: #63a9e6; } .fedmerge { stroke: #26a69a; fill: #26a69a; }
    .pooled { stroke: #b39ddb; fill: #b39ddb; } path { fill: none; }
  }
"""


def scores(files: Mapping[int, Sequence[Mapping[str, object]]]) -> dict[str, dict[int, list[float]]]:
    """By row and number of own rows the mean over the clients in each draw.

    Args:
        files: by number of own rows the lines of docs/results/rows.
    """
    found: dict[str, dict[int, list[float]]] = {row: {} for row in ROWS}
    for size, lines in files.items():
        for line in lines:
            row, own = line["row"], line["scores"]
            if row in found and isinstance(own, dict):
                found[str(row)].setdefault(size, []).append(fmean(own.values()))
    return {row: by_size for row, by_size in found.items() if by_size}


def picture(numbers: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """The SVG: a line through the means of each row, and a dot for each draw."""
    sizes = [size for size in SIZES if any(size in by_size for by_size in numbers.values())]
    low, high = _range([score for by_size in numbers.values() for draws in by_size.values() for score in draws])

    def x(size: int) -> float:
        return LEFT + 24 + (RIGHT - LEFT - 48) * sizes.index(size) / max(1, len(sizes) - 1)

    def y(score: float) -> float:
        return TOP + HEIGHT * (high - score) / (high - low)

    title = "ROUGE-1 over the number of a client's own rows"
    small = "Twelve clients, three real tasks, SmolLM2-135M. A dot is a draw."
    body = [f'<text class="title" x="0" y="18">{title}</text>', f'<text class="small" x="0" y="40">{small}</text>']
    for score in range(low, high + 1, 10):
        body += [
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{y(score):.1f}" y2="{y(score):.1f}"/>',
            f'<text class="small" x="{LEFT - 8}" y="{y(score) + 4:.1f}" text-anchor="end">{score}</text>',
        ]
    for size in sizes:
        body.append(f'<text x="{x(size):.1f}" y="{TOP + HEIGHT + 22}" text-anchor="middle">{size} rows</text>')
    for number, (row, by_size) in enumerate(numbers.items()):
        shift = 5 * (number - (len(numbers) - 1) / 2)  # pixels, so that dots of equal scores lie beside each other
        points = [(x(size) + shift, y(fmean(by_size[size]))) for size in sizes if size in by_size]
        line = " L".join(f"{across:.1f} {down:.1f}" for across, down in points)
        dots = [
            f'<circle class="{row}" cx="{x(size) + shift:.1f}" cy="{y(score):.1f}" r="3"/>'
            for size, draws in by_size.items()
            for score in draws
        ]
        below = TOP + HEIGHT + 48 + STEP * number
        body += [
            f'<path class="{row}" d="M{line}"/>',
            *dots,
            f'<path class="{row}" d="M0 {below - 4} L26 {below - 4}"/>',
            f'<text x="34" y="{below}">{row} <tspan class="small" dx="6">{ROWS[row]}</tspan></text>',
        ]
    height = TOP + HEIGHT + 48 + STEP * len(numbers)
    size_of = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size_of} role="img">'
    head += f"\n<style>{STYLE}</style><title>{title}</title>"
    return "\n".join([head, *body, "</svg>\n"])


def _range(values: Sequence[float]) -> tuple[int, int]:
    """The tens around all values."""
    return int(min(values) // 10 * 10), int(-(-max(values) // 10) * 10)


def kept() -> dict[int, list[Mapping[str, object]]]:
    """The lines of each number of own rows that has been run."""
    paths = {size: FOLDER / f"real_rows_{size}_{BASE}.jsonl" for size in SIZES}
    return {size: list(read_records(path)) for size, path in paths.items() if path.is_file()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.parse_args().out.write_text(picture(scores(kept())))


if __name__ == "__main__":
    main()
