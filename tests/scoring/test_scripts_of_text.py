"""Metrics in every script: tokens of ROUGE, credit for a right answer, and the warning where no answer can have any."""

import random
import string

import pytest
from rouge_score.tokenizers import DefaultTokenizer

from llm_fed.scoring.rouge import Tokenizer
from llm_fed.scoring.scores import score

TEXTS = {
    "Latin": "Die Straße führt über den Fluß nach Köln",
    "Cyrillic": "Привет, мир! Ещё одна строка",
    "Greek": "Ο ουρανός είναι γαλανός",
    "Arabic": "اَلْكِتَابُ جَدِيدٌ وَ جَمِيلٌ",
    "Persian": "می‌خواهم به خانه بروم",
    "Hebrew": "שלום עולם גדול",
    "Devanagari": "किताबें पढ़ना अच्छा है",
    "Bengali": "আমি ভাত খাই না",
    "Tamil": "தமிழ் மொழி இனிது",
    "Georgian": "ქართული ენა ლამაზია",
    "Hangul": "한국어 텍스트 입니다",
    "Han": "我喜欢机器学习。",
    "Japanese": "ラーメンが食べたいです。",
    "Thai": "สวัสดีครับ ๑๒๓",
    "Lao": "ພາສາລາວ",
    "Khmer": "ភាសាខ្មែរ",
    "Burmese": "မြန်မာဘာသာ",
    "mixed": "我用 PyTorch 训练 models，很快！",
}


def tokens(text: str) -> list[str]:
    return Tokenizer().tokenize(text)


def ascii_texts(count: int):
    """Random ASCII text, with and without control characters, and words of English shape."""
    draws = random.Random(0)
    endings = ["", "s", "ed", "ing", "ly", "ness", "ization", "'s", "ies", "ational"]
    for number in range(count):
        if number % 3 == 0:
            yield "".join(chr(draws.randrange(128)) for _ in range(draws.randrange(30)))
        elif number % 3 == 1:
            yield "".join(draws.choice(string.ascii_letters + " _-.,'0123") for _ in range(draws.randrange(40)))
        else:
            stems = ("".join(draws.choices(string.ascii_lowercase, k=draws.randrange(1, 9))) for _ in range(6))
            yield " ".join(stem.capitalize() + draws.choice(endings) for stem in stems)


def test_ascii_text_has_the_tokens_of_rouge_score():
    stock, own = DefaultTokenizer(use_stemmer=True), Tokenizer()
    for text in ascii_texts(6000):
        expected = stock.tokenize(text)
        assert own.tokenize(text) == expected, text
        assert own.tokenize(f"北{text}é") == ["北", *own.tokenize(f"{text}é")]  # and beside other scripts
        assert own.tokenize(f"{text} é") == [*expected, "é"], text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("我喜欢 machine learning 和Python3，真的！", "我 喜 欢 machin learn 和 python3 真 的"),
        ("ラーメンを食べた", "ラ ー メ ン を 食 べ た"),  # the long-vowel mark belongs to several scripts
        ("ｶﾞ ＡＢＣ", "ガ abc"),  # half and full width
        ("人々〇", "人 々 〇"),
        ("ดีครับ", "ดี ค รั บ"),  # a vowel above or below stays with its consonant
        ("किताबें पढ़ना", "किताबें पढ़ना"),  # as do the vowel signs of words
        ("جَدِيدٌ", "جَدِيدٌ"),
        ("می‌خواهم", "میخواهم"),  # a joiner within a word is invisible
        ("한국어 텍스트", "한국어 텍스트"),
        ("Straße STRASSE ﬁne", "strass strass fine"),
        ("cafe\u0301 café", "café café"),
        ("Σας σας", "σασ σασ"),
        ("don’t “stop”", "don t stop"),
        ("a\u200bb co\u00adop", "a b coop"),  # a space without width parts words, a soft hyphen does not
        ("… 😀 。！", ""),
    ],
)
def test_tokens_by_script(text, expected):
    assert tokens(text) == expected.split()


def test_rouge_of_chinese_by_hand():
    """北京大 against 北京大学在北: 3 of 3 and 3 of 6 characters, F1 2/3; pairs 2 of 2 and 2 of 5, F1 4/7."""
    found = {name: score(name, ["北京大"], [("北京大学在北",)]) for name in ("rouge1", "rouge2", "rougeL")}
    assert found == pytest.approx({"rouge1": 200 / 3, "rouge2": 400 / 7, "rougeL": 200 / 3})


@pytest.mark.parametrize("metric", ["rouge1", "rouge2", "rougeL", "squad_f1", "squad_em", "exact_match"])
def test_a_perfect_answer_scores_100_in_every_script(metric):
    for script, text in TEXTS.items():
        assert score(metric, [text], [(text,)]) == pytest.approx(100), script
