"""Accuracy of choosing among given options by log-likelihood, as an `evaluate` module."""

import math

import datasets
import evaluate


def credit(scores: list[float], right: int) -> float:
    """1 if option `right` alone has the highest score, 1/t if it shares it with t - 1 others, else 0.

    So a model that cannot tell the options apart scores at chance, not at the rate of the first option.
    NaN is never right.
    """
    if not 0 <= right < len(scores):
        raise ValueError(f"the right option is number {right}, but there are {len(scores)} options (counted from 0)")
    if math.isnan(scores[right]) or any(score > scores[right] for score in scores):
        return 0.0
    return 1 / scores.count(scores[right])


class OptionAccuracy(evaluate.Metric):
    """Share of right choices, 0-100.

    Either the log-likelihoods of an example's options (any number of them) and the index of the right one, or
    the text of the option that was chosen and the texts of the right ones, compared as they stand.
    """

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Accuracy of the option with the highest log-likelihood, 0-100.",
            citation="",
            inputs_description="predictions: a list of log-likelihoods per example, references: the index of "
            "the right one; or predictions: the text of the chosen option, references: lists of right texts.",
            features=[
                datasets.Features(
                    {
                        "predictions": datasets.Value("string"),
                        "references": datasets.Sequence(datasets.Value("string")),
                    }
                ),
                datasets.Features(
                    {
                        "predictions": datasets.Sequence(datasets.Value("float64")),
                        "references": datasets.Value("int64"),
                    }
                ),
            ],
        )

    @staticmethod
    def _compute(predictions, references):
        if len({isinstance(prediction, str) for prediction in predictions}) > 1:
            raise ValueError("predictions are texts or log-likelihoods, not both")
        credits = [
            float(prediction in right) if isinstance(prediction, str) else credit(prediction, right)
            for prediction, right in zip(predictions, references, strict=True)
        ]
        return {"option_accuracy": 100 * sum(credits) / len(credits)}
