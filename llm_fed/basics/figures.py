"""Figures as the files of a run hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def rounded(value: Any) -> Any:
    """Every float, in dictionaries and lists too, to six significant digits: enough to read, and alike where only the
    last bit differs. One that JSON does not have is None."""
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [rounded(item) for item in value]
    if isinstance(value, int):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
