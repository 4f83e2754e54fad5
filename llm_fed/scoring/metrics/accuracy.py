"""Accuracy of classification."""


def compute(predictions, references):
    """Share of the examples whose predicted label is the right one, 0-100."""
    hits = [prediction == right for prediction, right in zip(predictions, references, strict=True)]
    return {"accuracy": 100 * sum(hits) / len(hits)}
