"""Matthews correlation of labels (Matthews 1975; for more than two labels Gorodkin 2004)."""

from collections import Counter
from math import sqrt


def compute(predictions, references):
    """-100 to 100; 0 where all predictions, or all right labels, are the same."""
    count, said, right = len(references), Counter(predictions), Counter(references)
    hits = sum(one == other for one, other in zip(predictions, references, strict=True))
    by_chance = sum(said[label] * right[label] for label in right)
    spread = [count**2 - sum(number**2 for number in counts.values()) for counts in (said, right)]
    found = (hits * count - by_chance) / sqrt(spread[0] * spread[1]) if all(spread) else 0.0
    return {"matthews": 100 * found}
