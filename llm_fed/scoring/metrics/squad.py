"""F1 and exact match of SQuAD 1.1 (Rajpurkar et al. 2016)."""

import string
from collections import Counter

ARTICLES = {"a", "an", "the"}
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def words(text: str) -> list[str]:
    """The words that count: lower case, ASCII punctuation removed, English articles left out."""
    return [word for word in text.lower().translate(NO_PUNCTUATION).split() if word not in ARTICLES]


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over the bag of words, 0-1; 0 where no word is shared."""
    said, right = words(prediction), words(reference)
    shared = sum((Counter(said) & Counter(right)).values())
    return 2 * shared / (len(said) + len(right)) if shared else 0.0


def can_score(reference: str, metric: str) -> bool:
    """Whether an answer that equals this reference scores above 0: F1 needs a word that counts."""
    return metric == "squad_em" or bool(words(reference))


def compute(predictions, references):
    """Means over the examples, 0-100, each example with its best reference, per metric.

    Made for English and used as it is for other languages, as the papers on XQuAD do: only English articles are
    left out (German "der" or Spanish "el" count as words), only ASCII punctuation is removed ("¿" and "。" stay),
    and words are what stands between spaces, so in Chinese and Thai an answer is mostly one word and F1 near exact
    match. Scores of different languages are not comparable; scores of methods within a language are.
    """
    pairs = list(zip(predictions, references, strict=True))
    overlap = [max(f1(prediction, text) for text in texts) for prediction, texts in pairs]
    equal = [words(prediction) in map(words, texts) for prediction, texts in pairs]
    return {"squad_f1": 100 * sum(overlap) / len(pairs), "squad_em": 100 * sum(equal) / len(pairs)}
