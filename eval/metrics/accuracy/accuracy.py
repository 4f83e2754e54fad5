"""Accuracy of classification as an `evaluate` module."""

import datasets
import evaluate


class Accuracy(evaluate.Metric):
    """Share of the examples whose predicted label is the right one, 0-100."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Share of right labels, 0-100.",
            citation="",
            inputs_description="predictions, references: one label's index per example.",
            features=datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}),
        )

    @staticmethod
    def _compute(predictions, references):
        hits = [prediction == right for prediction, right in zip(predictions, references, strict=True)]
        return {"accuracy": 100 * sum(hits) / len(hits)}
