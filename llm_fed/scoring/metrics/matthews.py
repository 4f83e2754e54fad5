"""Matthews correlation of labels (Matthews 1975; for more than two labels Gorodkin 2004)."""

from collections import Counter
from math import nan, sqrt


def compute(predictions, references):
    """-100 to 100; 0 where all predictions are the same, as scikit-learn's; NaN where all right labels are."""
    count, said, right = len(references), Counter(predictions), Counter(references)
    hits = sum(one == other for one, other in zip(predictions, references, strict=True))
    by_chance = sum(said[label] * right[label] for label in right)
    spread = [count**2 - sum(number**2 for number in counts.values()) for counts in (said, right)]
    if not spread[1]:
        return {"matthews": nan}
    found = (hits * count - by_chance) / sqrt(spread[0] * spread[1]) if spread[0] else 0.0
    return {"matthews": 100 * found}
