"""Accuracy of the answer found in a generated text, by the rules of LLM-Adapters."""

import re

from llm_fed.basics.errors import UserError

KINDS = ("true|false", "solution[12]", "answer[1-5]", "ending[1-4]", "option[12]")  # one for each kind of data set


def extract(text: str, kind: str) -> str | None:
    """The first answer of this kind in the text, None where there is none; as in LLM-Adapters upper case does not
    match and word borders do not count ("answer10" holds answer1)."""
    match = re.search(kind, text)
    return match.group() if match else None


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


def can_score(reference: str, metric: str) -> bool:
    """Whether an answer that equals this reference is right: the first answer in it must be its last word."""
    return extract(reference, kind_of(reference)) == reference.split()[-1]


def compute(predictions, references):
    """Share of texts in which the first answer of the reference's kind is the reference's; none found is wrong."""
    hits = [
        any(extract(prediction, kind_of(text)) == text.split()[-1] for text in texts)
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    return {"commonsense_accuracy": 100 * sum(hits) / len(hits)}
