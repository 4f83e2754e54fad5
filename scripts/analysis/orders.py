"""How many pairs of rows of a results page's table are in the paper's order.

    python scripts/analysis/orders.py docs/results/feddle.md --above 1 --rows feddle

The table is the page's first in which each column of ours has one named `paper` to its right. Pairs count whose means
differ by more than `--above` points in the paper. Those in another order here are listed. `--rows` counts the pairs
alone of which one row, and no more, has a name with this text in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from results import plain_errors

from llm_fed.basics.errors import UserError
from llm_fed.basics.terminal import lasting_streams

TOLERANCE = 1e-9  # the means have one decimal


@dataclass(frozen=True)
class Pair:
    """Two rows of one column; the differences are of the first to the second, in points."""

    column: str
    first: str
    second: str
    paper: float
    here: float

    @property
    def agrees(self) -> bool:
        return self.paper * self.here > TOLERANCE  # of equal means none is ahead

    def __str__(self) -> str:
        return f"{self.column}: {self.first} to {self.second} {self.here:+.1f}, in the paper {self.paper:+.1f}"


def read_table(page: Path) -> tuple[list[str], dict[str, list[float]]]:
    """The names of our columns, and the means of each row: ours, the paper's, ours, ...

    Raises:
        UserError: the page cannot be read or has no such table, or a cell has no number.
    """
    try:
        lines = page.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{page} cannot be read: {error}") from error
    header: list[str] = []
    rows: dict[str, list[float]] = {}
    for number, line in enumerate(lines, start=1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            if header:
                break
        elif header and not set(line) <= set("|-: "):
            matches = [re.match(r"-?\d+(\.\d+)?", cell) for cell in cells[1:]]
            if len(cells) != len(header) or not all(matches):
                raise UserError(f"{page}:{number}: this row of the table has a cell without a number")
            rows[cells[0].replace("`", "")] = [float(number.group()) for number in matches if number]
        elif len(cells) > 2 and len(cells) % 2 and set(cells[2::2]) == {"paper"}:
            header = cells
    if not rows:
        raise UserError(f"{page} has no table in which each column of ours has one named `paper` to its right")
    return header[1::2], rows


def pairs(columns: Sequence[str], rows: dict[str, list[float]], above: float, part: str = "") -> list[Pair]:
    """The pairs that count, column by column."""
    counted = []
    for place, column in enumerate(columns):
        for first, second in combinations(rows, 2):
            here, paper = (rows[first][2 * place + k] - rows[second][2 * place + k] for k in (0, 1))
            if abs(paper) > above + TOLERANCE and (not part or (part in first) != (part in second)):
                counted.append(Pair(column, first, second, paper, here))
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--above", type=float, default=1.0, help="points in the paper")
    parser.add_argument("--rows", default="", help="a part of a row's name")
    asked = parser.parse_args()
    with plain_errors(parser):
        counted = pairs(*read_table(asked.page), asked.above, asked.rows)
    others = [pair for pair in counted if not pair.agrees]
    print(f"{len(counted) - len(others)} of {len(counted)} pairs are in the paper's order; the others:")
    print("\n".join(f"  {pair}" for pair in others))


if __name__ == "__main__":
    with lasting_streams():
        main()
