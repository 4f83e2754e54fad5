"""Accuracy of choosing among given options by log-likelihood."""

import math
from collections.abc import Sequence


def credit(scores: list[float], right: int | Sequence[int]) -> float:
    """1 if option `right`, or one of several, alone has the highest score; of t options that share it the share that is
    right. So a model that cannot tell the options apart scores at chance. NaN is never right."""
    indices = [right] if isinstance(right, int) else right
    if not (indices and all(0 <= index < len(scores) for index in indices)):
        raise ValueError(f"the right option is number {right}, but there are {len(scores)} options (counted from 0)")
    best = max((score for score in scores if not math.isnan(score)), default=math.nan)
    chosen = {index for index, score in enumerate(scores) if score == best}
    return len(chosen & set(indices)) / max(1, len(chosen))


def compute(predictions, references):
    """Share of right choices, 0-100: of the log-likelihoods of an example's options and the index of the right one, or
    of the text of the chosen option and the texts of the right ones, compared as they stand."""
    if len({isinstance(prediction, str) for prediction in predictions}) > 1:
        raise ValueError("predictions are texts or log-likelihoods, not both")
    credits = [
        float(prediction in right) if isinstance(prediction, str) else credit(prediction, right)
        for prediction, right in zip(predictions, references, strict=True)
    ]
    return {"option_accuracy": 100 * sum(credits) / len(credits)}
