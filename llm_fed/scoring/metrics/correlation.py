"""Correlations of predicted numbers with right ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def compute(predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """-100 to 100, Pearson's of the numbers and Spearman's of their ranks; NaN where all predictions, or all right
    numbers, are the same."""
    said, right = np.asarray(predictions, float), np.asarray(references, float)
    return {"pearson": 100 * _pearson(said, right), "spearman": 100 * _pearson(_ranks(said), _ranks(right))}


def _pearson(x: np.ndarray, y: np.ndarray) -> float:
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return float("nan")
    x, y = ((each - each.mean()) / np.linalg.norm(each - each.mean()) for each in (x, y))
    return float(np.clip(x @ y, -1, 1))


def _ranks(values: np.ndarray) -> np.ndarray:
    """(N,) from 1 on; equal values share the mean of their ranks."""
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[indices]
