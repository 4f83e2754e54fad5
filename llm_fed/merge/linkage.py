"""Agglomerative clustering of a few hundred rows by their distances."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Linkage = Literal["single", "complete", "average"]


def agglomerated(distances: Tensor, linkage: Linkage, *, clusters: int = 1, most: float = math.inf) -> list[list[int]]:
    """The rows in clusters, each in ascending order, by their smallest row.

    The two nearest clusters become one until `clusters` are left, or all are further apart than `most`.

    Args:
        distances: (m, m), symmetric; the diagonal does not count.
        linkage: how far two clusters are apart: as their nearest rows (single), their furthest (complete), or the mean
            over all pairs (average).
    """
    apart = distances.double().clone().fill_diagonal_(math.inf)
    members = {row: [row] for row in range(len(apart))}
    while len(members) > clusters:
        a, b = sorted(divmod(int(apart.argmin()), len(apart)))
        if not float(apart[a, b]) <= most:
            break
        size_a, size_b = len(members[a]), len(members[b])
        both = {
            "single": torch.minimum(apart[a], apart[b]),
            "complete": torch.maximum(apart[a], apart[b]),
            "average": (size_a * apart[a] + size_b * apart[b]) / (size_a + size_b),
        }[linkage]
        apart[a] = apart[:, a] = both
        apart[a, a] = math.inf
        apart[b] = apart[:, b] = math.inf
        members[a] = sorted(members[a] + members.pop(b))
    return [members[row] for row in sorted(members)]


def cosines(rows: Tensor) -> Tensor:
    """(m, m), the cosines of rows (m, P); 0 of a row without length."""
    products = rows.double() @ rows.double().T
    norms = products.diagonal().clamp_min(0).sqrt().clamp_min(1e-30)
    return products / norms[:, None] / norms
