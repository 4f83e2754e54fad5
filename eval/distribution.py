"""How scores are distributed over the clients: a histogram in which the worst half of them stands out."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

FEW = 20  # of so many clients a table is read at a glance
TOP = 100  # the highest score
_WIDTHS = (1, 2, 5, 10, 20, 25, 50, 100)  # of a bin, in points; each divides TOP


@dataclass(frozen=True)
class Bin:
    """The clients whose score is at least `low` and below `high`; a score of 100 is in the last bin."""

    low: int
    high: int
    worst: int  # clients of the worst half, which are the ceil(n / 2) lowest ones
    others: int

    @property
    def count(self) -> int:
        return self.worst + self.others


def histogram(scores: Collection[float], *, most: int = 20, within: Collection[float] = ()) -> list[Bin]:
    """At `most` so many bins without a gap between them, from the lowest score to the highest, one per client and 0 to
    100; none without a score. Their width is the smallest of 1, 2, 5, 10, 20, ... points that suffices, and they cover
    the values `within`, too, such as the score of the base."""
    if not scores:
        return []
    low, high = min([*scores, *within]), max([*scores, *within])

    def place(value: float, width: int) -> int:
        return max(0, min(math.floor(value / width), TOP // width - 1))

    width = next(width for width in _WIDTHS if place(high, width) - place(low, width) < most or width == TOP)
    first, last = place(low, width), place(high, width)
    counts = [[0, 0] for _ in range(last - first + 1)]
    half = (len(scores) + 1) // 2
    for rank, score in enumerate(sorted(scores)):
        counts[place(score, width) - first][rank >= half] += 1
    return [
        Bin(width * (first + number), width * (first + number + 1), worst, others)
        for number, (worst, others) in enumerate(counts)
    ]
