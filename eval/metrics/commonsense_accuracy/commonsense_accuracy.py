"""Accuracy of the answer found in a generated text, by the rules of LLM-Adapters, as an `evaluate` module."""

import re

import datasets
import evaluate

from llm_fed.errors import UserError

KINDS = ("true|false", "solution[12]", "answer[1-5]", "ending[1-4]", "option[12]")  # one for each kind of data set


def extract(text: str, kind: str) -> str | None:
    """The first answer of this kind in the text, None where there is none; as in LLM-Adapters upper case does not
    match and word borders do not count ("answer10" holds answer1)."""
    found = re.search(kind, text)
    return found.group() if found else None


def kind_of(reference: str) -> str:
    """Which of KINDS the last word of a reference belongs to."""
    last = reference.split()[-1:]
    for kind in KINDS:
        if last and re.fullmatch(kind, last[0]):
            return kind
    raise UserError(
        f"commonsense_accuracy: the reference {reference[:60]!r} does not end in an answer such as answer1 or true; "
        "use eval.metric=exact_match"
    )


class CommonsenseAccuracy(evaluate.Metric):
    """Share of texts in which the first answer of the reference's kind is the reference's; none found is wrong."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description="Accuracy of the first true/false, solutionN, answerN, endingN or optionN in a text, 0-100.",
            citation="Hu et al., LLM-Adapters, EMNLP 2023.",
            inputs_description="predictions: one text per example; references: a list of texts per example that end "
            'in the right answer, e.g. "the correct answer is answer1".',
            features=datasets.Features(
                {
                    "predictions": datasets.Value("string"),
                    "references": datasets.Sequence(datasets.Value("string")),
                }
            ),
        )

    @staticmethod
    def can_score(reference: str, metric: str) -> bool:
        """Whether an answer that equals this reference is right: the first answer in it must be its last word."""
        return extract(reference, kind_of(reference)) == reference.split()[-1]

    @staticmethod
    def _compute(predictions, references):
        hits = [
            any(extract(prediction, kind_of(text)) == text.split()[-1] for text in texts)
            for prediction, texts in zip(predictions, references, strict=True)
        ]
        return {"commonsense_accuracy": 100 * sum(hits) / len(hits)}
