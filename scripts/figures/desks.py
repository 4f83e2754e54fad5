"""Draws the bars of docs/images/desks.svg from the first table of docs/results/desks.md.

One file serves light and dark pages: its style sheet asks which of the two the reader prefers.

    python scripts/figures/desks.py docs/images/desks.svg
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/results/desks.md"
ROWS = {
    "base": "the model without training",
    "rule": "the best answer without a model",
    "local": "each desk trains alone",
    "fedit": "one adapter for all (federated averaging)",
    "fedmerge": "each desk gets a mixture of four adapters",
}
WIDTH, SCALE, STEP, TOP = 440, 4.8, 58, 70  # pixels: in all, of a point of ROUGE-1, from row to row, above the rows
STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1f2933; }
  .name { font-weight: 600; } .small { font-size: 12px; fill: #52606d; } .title { font-size: 16px; font-weight: 600; }
  .mean { fill: #8a9ba8; } .half { fill: #c5cfd6; } .best .mean { fill: #00897b; } .best .half { fill: #80cbc4; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb; } .small { fill: #9fb3c8; } .mean { fill: #7b8794; } .half { fill: #4b5866; }
    .best .mean { fill: #26a69a; } .best .half { fill: #1d6f67; }
  }
"""


def figures(page: str) -> dict[str, tuple[float, float]]:
    """Mean and worst half of ROUGE-1 by row, from the page's table of 36 steps.

    Raises:
        LookupError: the page has no such row.
    """
    table = page[page.index("| 36 steps |") : page.index("| 200 steps |")]
    numbers = {}
    for row in ROWS:
        match = re.search(rf"^\| `{row}`[^|]*\| \**([\d.]+)\** \| \**([\d.]+)\** \|", table, re.MULTILINE)
        if match is None:
            raise LookupError(f"{PAGE.name} has no row of {row}")
        numbers[row] = (float(match[1]), float(match[2]))
    return numbers


def picture(numbers: dict[str, tuple[float, float]]) -> str:
    """The SVG: two bars per row, the best row in another colour."""
    best = max(numbers, key=lambda row: numbers[row][0])
    rows = [_row(n, row, numbers[row], row == best) for n, row in enumerate(numbers)]
    height = TOP + STEP * len(rows) + 6
    title = "ROUGE-1 on five desks' own test questions"
    legend = [
        "SmolLM2-135M-Instruct, 36 steps per desk, four federations.",
        "Upper bar: mean; lower bar: worst half of the desks.",
    ]
    # A width, so that a page shows it as drawn; narrow, so that a phone need not make its words smaller.
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<style>{STYLE}</style>'
    words = f'<title>{title}</title>\n<text class="title" x="0" y="18">{title}</text>'
    small = [f'<text class="small" x="0" y="{38 + 16 * n}">{line}</text>' for n, line in enumerate(legend)]
    return "\n".join([head, words, *small, *rows, "</svg>\n"])


def _row(place: int, row: str, numbers: tuple[float, float], best: bool) -> str:
    mean, half = numbers
    y = TOP + STEP * place
    return (
        f'<g class="{"best" if best else "other"}"><text x="0" y="{y + 12}"><tspan class="name">{row}</tspan>'
        f'<tspan class="small" dx="8">{ROWS[row]}</tspan></text>'
        f'<rect class="mean" x="0" y="{y + 18}" width="{mean * SCALE:.1f}" height="17" rx="2"/>'
        f'<text class="name" x="{mean * SCALE + 8:.1f}" y="{y + 32}">{mean}</text>'
        f'<rect class="half" x="0" y="{y + 37}" width="{half * SCALE:.1f}" height="10" rx="2"/>'
        f'<text class="small" x="{half * SCALE + 8:.1f}" y="{y + 46}">{half}</text></g>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="the SVG file to write")
    parser.parse_args().out.write_text(picture(figures(PAGE.read_text())))


if __name__ == "__main__":
    main()
