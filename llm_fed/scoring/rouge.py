"""The words that ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004) compare, for the `rouge_score` package."""

from __future__ import annotations

import functools
import unicodedata

import regex
from nltk.stem.porter import PorterStemmer
from rouge_score import tokenizers

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
_stem = functools.lru_cache(2**16)(PorterStemmer().stem)  # which takes most of the time


def normalise(text: str) -> str:
    """Unicode's NFKC_Casefold: full-width letters and ligatures become plain ones, ASCII is lowercased, and joiners
    within Persian or Indic words are left out. The zero-width space stays, since it separates words."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    return folded if folded.isascii() else INVISIBLE.sub("", folded)


class Tokenizer(tokenizers.Tokenizer):
    """Words and characters by script; English words as Porter stems. On ASCII text the tokens are exactly those of
    rouge_score with its stemmer."""

    def tokenize(self, text: str) -> list[str]:
        tokens = TOKEN.findall(normalise(text))
        return [_stem(token) if len(token) > 3 and token.isascii() else token for token in tokens]
