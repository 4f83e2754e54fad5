"""F1 of labels: of the second of two labels as in GLUE, or the mean over the labels."""

import math


def compute(predictions, references):
    """0-100 each, as scikit-learn's `f1_score`: `f1` of label 1, and `f1_macro` the mean over all labels that were
    predicted or right. A label that was never predicted right has 0. NaN where all right labels are the same: then it
    says nothing that accuracy does not."""
    if len({*references}) == 1:
        return {"f1": math.nan, "f1_macro": math.nan}
    labels = sorted({*predictions, *references})
    each = {label: _f1(label, predictions, references) for label in labels}
    return {"f1": 100 * each.get(1, 0.0), "f1_macro": 100 * sum(each.values()) / len(labels)}


def _f1(label, predictions, references):
    """2 TP / (2 TP + FP + FN)."""
    hits = sum(label == said == right for said, right in zip(predictions, references, strict=True))
    either = sum(label == said for said in predictions) + sum(label == right for right in references)
    return 2 * hits / either
