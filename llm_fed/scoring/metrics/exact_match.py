"""Exact match of normalised texts."""

import unicodedata


def normalise(text: str) -> str:
    """Unicode NFC, case folded, runs of white space as one space, none at the ends. Punctuation and articles count,
    unlike in SQuAD's exact match: "3.0" is not "30", and a task that asks for punctuation can be scored."""
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def compute(predictions, references):
    """Share of the examples whose normalised prediction equals one of their normalised references, 0-100."""
    hits = [
        normalise(prediction) in map(normalise, texts)
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    return {"exact_match": 100 * sum(hits) / len(hits)}
