"""What each metric makes of all predictions and what is right: a number, mostly from 0 to 100. ROUGE is in `rouge`."""

from __future__ import annotations

import math
import re
import statistics
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from llm_fed.basics.errors import UserError

Prediction = str | int | float | Sequence[float]  # a text, a label or a number, or an option's log-likelihoods
Reference = Sequence[str] | Sequence[int] | int | float  # the texts that are right, or the options, or the label
Texts = Sequence[str]  # the answers of the examples
Right = Sequence[Sequence[str]]  # of each example the texts that are right
Labels = Sequence[int]
Numbers = Sequence[float]

ARTICLES = {"a", "an", "the"}
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What an answer of LLM-Adapters' commonsense data is; one for each kind of data set.
KINDS = ("true|false", "solution[12]", "answer[1-5]", "ending[1-4]", "option[12]")


def _share(credits: Iterable[float]) -> float:
    """The mean credit of the examples, 0-100."""
    found = list(credits)
    return 100 * sum(found) / len(found)


def accuracy(said: Labels, right: Labels) -> float:
    """Share of the examples whose predicted label is the right one."""
    return _share(one == other for one, other in zip(said, right, strict=True))


def f1(said: Labels, right: Labels) -> float:
    """F1 of label 1 of two, as in GLUE; NaN where all right labels are the same, as it says no more than accuracy."""
    return math.nan if len({*right}) == 1 else 100 * _f1_of(1, said, right)


def f1_macro(said: Labels, right: Labels) -> float:
    """The mean F1 of all labels that were predicted or right, as scikit-learn's; NaN as of `f1`."""
    labels = sorted({*said, *right})
    return math.nan if len({*right}) == 1 else _share(_f1_of(label, said, right) for label in labels)


def _f1_of(label: int, said: Labels, right: Labels) -> float:
    """2 TP / (2 TP + FP + FN), 0-1; 0 of a label that is neither predicted nor right."""
    hits = sum(label == one == other for one, other in zip(said, right, strict=True))
    either = sum(one == label for one in said) + sum(other == label for other in right)
    return 2 * hits / either if either else 0.0


def matthews(said: Labels, right: Labels) -> float:
    """Matthews correlation (Matthews 1975; for more than two labels Gorodkin 2004), -100 to 100; 0 where all
    predictions are the same, as scikit-learn's; NaN where all right labels are."""
    count, frequencies = len(right), (Counter(said), Counter(right))
    hits = sum(one == other for one, other in zip(said, right, strict=True))
    by_chance = sum(frequencies[0][label] * number for label, number in frequencies[1].items())
    of_said, of_right = (count**2 - sum(number**2 for number in each.values()) for each in frequencies)
    if not of_right:
        return math.nan
    return 100 * (hits * count - by_chance) / math.sqrt(of_said * of_right) if of_said else 0.0


def pearson(said: Numbers, right: Numbers) -> float:
    """Pearson's correlation, -100 to 100; NaN where all predictions, or all right numbers, are the same."""
    try:
        return 100 * min(max(statistics.correlation(said, right), -1.0), 1.0)
    except (ValueError, OverflowError):  # one of them does not vary, or is infinite, as of a head that diverged
        return math.nan


def spearman(said: Numbers, right: Numbers) -> float:
    """Spearman's correlation, of the ranks, as `pearson`; equal values share the mean of their ranks."""
    from pandas import Series  # takes a second to import

    return pearson(Series(said).rank().tolist(), Series(right).rank().tolist())


def option_accuracy(said: Sequence[str | Numbers], right: Sequence[Any]) -> float:
    """Share of right choices: of the log-likelihoods of an example's options and the index of the right one, or of the
    text of the chosen option and the texts of the right ones, compared as they stand."""
    if len({isinstance(each, str) for each in said}) > 1:
        raise ValueError("predictions are texts or log-likelihoods, not both")
    return _share(
        float(one in other) if isinstance(one, str) else _credit(one, other)
        for one, other in zip(said, right, strict=True)
    )


def _credit(scores: Numbers, right: int | Sequence[int]) -> float:
    """1 if option `right`, or one of several, alone has the highest score; of t options that share it the share that is
    right. So a model that cannot tell the options apart scores at chance. NaN is never right."""
    indices = [right] if isinstance(right, int) else right
    if not (indices and all(0 <= index < len(scores) for index in indices)):
        raise ValueError(f"the right option is number {right}, but there are {len(scores)} options (counted from 0)")
    best = max((score for score in scores if not math.isnan(score)), default=math.nan)
    chosen = {index for index, score in enumerate(scores) if score == best}
    return len(chosen & set(indices)) / max(1, len(chosen))


def normalise(text: str) -> str:
    """Unicode NFC, case folded, runs of white space as one space, none at the ends. Punctuation and articles count,
    unlike in SQuAD's exact match: "3.0" is not "30", and a task that asks for punctuation can be scored."""
    return " ".join(unicodedata.normalize("NFC", text.casefold()).split())


def exact_match(said: Texts, right: Right) -> float:
    """Share of the examples whose normalised prediction equals one of their normalised references."""
    return _share(normalise(text) in map(normalise, texts) for text, texts in zip(said, right, strict=True))


def commonsense_accuracy(said: Texts, right: Right) -> float:
    """Share of texts in which the first answer of the reference's kind is the reference's, by the rules of
    LLM-Adapters; none found is wrong."""
    return _share(
        any(_extracted(text, _kind_of(one)) == one.split()[-1] for one in texts)
        for text, texts in zip(said, right, strict=True)
    )


def ends_in_its_answer(reference: str) -> bool:
    """Whether an answer that equals this reference is right under `commonsense_accuracy`: the first answer in it must
    be its last word."""
    return _extracted(reference, _kind_of(reference)) == reference.split()[-1]


def _extracted(text: str, kind: str) -> str | None:
    """The first answer of this kind in the text, None where there is none; as in LLM-Adapters upper case does not
    match and word borders do not count ("answer10" holds answer1)."""
    match = re.search(kind, text)
    return match.group() if match else None


def _kind_of(reference: str) -> str:
    """Which of KINDS the last word of a reference belongs to."""
    last = reference.split()[-1:]
    for kind in KINDS:
        if last and re.fullmatch(kind, last[0]):
            return kind
    raise UserError(
        f"commonsense_accuracy: the reference {reference[:60]!r} does not end in an answer such as answer1 or true; "
        "use eval.metric=exact_match"
    )


def squad_words(text: str) -> list[str]:
    """The words that count in SQuAD 1.1 (Rajpurkar et al. 2016): lower case, no ASCII punctuation, no a, an, the."""
    return [word for word in text.lower().translate(NO_PUNCTUATION).split() if word not in ARTICLES]


def squad_f1(said: Texts, right: Right) -> float:
    """The mean of F1 over the bag of words, each example with its best reference; 0 where no word is shared.

    Made for English and used as it is for other languages, as the papers on XQuAD do: only English articles are
    left out (German "der" or Spanish "el" count as words), only ASCII punctuation is removed ("¿" and "。" stay),
    and words are what stands between spaces, so in Chinese and Thai an answer is mostly one word and F1 near exact
    match. Scores of different languages are not comparable; scores of methods within a language are.
    """
    return _share(max(_overlap(text, one) for one in texts) for text, texts in zip(said, right, strict=True))


def _overlap(prediction: str, reference: str) -> float:
    said, right = squad_words(prediction), squad_words(reference)
    shared = sum((Counter(said) & Counter(right)).values())
    return 2 * shared / (len(said) + len(right)) if shared else 0.0


def squad_em(said: Texts, right: Right) -> float:
    """Share of the predictions whose `squad_words` are those of a reference."""
    return _share(squad_words(text) in map(squad_words, texts) for text, texts in zip(said, right, strict=True))


def rouge(kind: str, said: Texts, right: Right) -> float:
    """The mean F1 of rouge1, rouge2 or rougeL (`kind`); Porter stemmer on; each example with its best reference.

    Text is cut by script: in Chinese, Japanese, Thai, Lao, Khmer and Burmese each character is a token, elsewhere each
    word, and a text may mix them. Punctuation, symbols and emoji are no tokens, so a reference of these alone scores 0
    even against itself, and so does one of a single token under rouge2 (use exact_match there).
    """
    from rouge_score.rouge_scorer import RougeScorer  # takes long to import, and most commands score nothing

    from llm_fed.scoring.rouge import Tokenizer

    score = RougeScorer([kind], tokenizer=Tokenizer()).score_multi
    return _share(score(texts, text)[kind].fmeasure for text, texts in zip(said, right, strict=True))


def has_words(number: int, text: str) -> bool:
    """Whether a text has so many tokens of ROUGE: an answer that equals it scores above 0 only with one, under ROUGE-2
    with two."""
    from llm_fed.scoring.rouge import TOKEN, normalise

    return len(list(islice(TOKEN.finditer(normalise(text)), number))) == number
