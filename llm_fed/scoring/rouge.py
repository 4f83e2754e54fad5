"""ROUGE-1, ROUGE-2 and ROUGE-L F1 (Lin 2004), on top of the `rouge_score` package."""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Sequence
from itertools import islice

import regex
from nltk.stem.porter import PorterStemmer
from rouge_score import rouge_scorer, tokenizers

# Scripts that put no space between words: Han, kana, and those of South-East Asia, which Unicode's line breaking
# calls SA (Thai, Lao, Khmer, Myanmar and their neighbours). Script extensions also cover what several scripts share,
# such as the long-vowel mark of kana.
UNSPACED = r"\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{scx=Bopo}\p{scx=Yiii}\p{lb=SA}"
# One character of such a script with its marks, or a run of other letters and digits, whose marks stay in the word.
TOKEN = regex.compile(
    rf"[[\p{{L}}\p{{N}}]&&[{UNSPACED}]]\p{{M}}*|[[\p{{L}}\p{{N}}]--[{UNSPACED}]][[\p{{L}}\p{{N}}\p{{M}}]--[{UNSPACED}]]*",
    regex.VERSION1,
)
INVISIBLE = regex.compile(r"[\p{Default_Ignorable_Code_Point}--\u200b]+", regex.VERSION1)


def normalise(text: str) -> str:
    """Unicode's NFKC_Casefold: full-width letters and ligatures become plain ones, ASCII is lowercased, and joiners
    within Persian or Indic words are left out. The zero-width space stays, since it separates words."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return folded if folded.isascii() else INVISIBLE.sub("", folded)


class Tokenizer(tokenizers.Tokenizer):
    """Words and characters by script; English words as Porter stems, each stemmed once, since that takes most of the
    time. On ASCII text the tokens are exactly those of rouge_score with its stemmer."""

    def __init__(self) -> None:
        self.stem = functools.lru_cache(2**16)(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        return [
            self.stem(token) if len(token) > 3 and token.isascii() else token
            for token in TOKEN.findall(normalise(text))
        ]


def has_tokens(text: str, number: int) -> bool:
    """Whether a text has so many: an answer that equals it scores above 0 only with one, under ROUGE-2 with two."""
    return len(list(islice(TOKEN.finditer(normalise(text)), number))) == number


def f1_of(kind: str, said: Sequence[str], right: Sequence[Sequence[str]]) -> float:
    """Mean F1 over the examples, 0-100; Porter stemmer on; each example with its best reference.

    Text is cut by script: in Chinese, Japanese, Thai, Lao, Khmer and Burmese each character is a token, elsewhere each
    word, and a text may mix them. Punctuation, symbols and emoji are no tokens, so a reference of these alone scores 0
    even against itself, and so does one of a single token under rouge2 (use exact_match there).
    """
    scorer = rouge_scorer.RougeScorer([kind], tokenizer=_tokenizer())
    best = [scorer.score_multi(texts, text)[kind].fmeasure for text, texts in zip(said, right, strict=True)]
    return float(100 * sum(best) / len(best))


@functools.cache
def _tokenizer() -> Tokenizer:
    """One for all clients, as many of their words are the same."""
    return Tokenizer()
