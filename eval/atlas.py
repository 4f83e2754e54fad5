"""What searches of merging coefficients found, round by round: how the coefficients spread, and how many are
negative."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llm_fed.eval.plots import plot_spread


@dataclass(frozen=True)
class Spread:
    """The coefficients that one round's search found, one per anchor of the atlas."""

    round: int
    anchors: int
    quantiles: tuple[float, ...]  # minimum, lower quartile, median, upper quartile, maximum
    negative: float  # share of the coefficients that are below zero


def spreads(lines: Iterable[Mapping[str, Any]]) -> list[Spread]:
    """Of the `server` lines of a metrics.jsonl that hold coefficients; a run without a search has none."""
    found = ((line["round"], np.array(line["coefficients"])) for line in lines if line.get("coefficients"))
    return [
        Spread(
            round, len(values), tuple(np.quantile(values, (0, 0.25, 0.5, 0.75, 1)).tolist()), float(np.mean(values < 0))
        )
        for round, values in found
    ]


def draw(found: list[Spread], path: Path, *, dark: bool = False) -> Path:
    rounds, quantiles = [spread.round for spread in found], [spread.quantiles for spread in found]
    return plot_spread(path, rounds, quantiles, [spread.negative for spread in found], dark=dark)
