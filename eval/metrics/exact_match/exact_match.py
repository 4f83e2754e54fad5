"""Exact match of normalised texts as an `evaluate` module."""

import unicodedata

import datasets
import evaluate


def normalise(text: str) -> str:
    """Unicode NFC, case folded, runs of white space as one space, none at the ends.

    Punctuation and articles count, unlike in SQuAD's exact match: "3.0" is not "30", and a task that asks for
    punctuation can be scored.
    """
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


class ExactMatch(evaluate.Metric):
    """Share of the examples whose normalised prediction equals one of their normalised references, 0-100."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Exact match after NFC, case folding and white-space clean-up, any reference, 0-100.",
            citation="",
            inputs_description="predictions: one text per example; references: a list of texts per example.",
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    @staticmethod
    def _compute(predictions, references):
        hits = [
            normalise(prediction) in map(normalise, texts)
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {"exact_match": 100 * sum(hits) / len(hits)}
