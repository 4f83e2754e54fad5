"""Metrics in every script: tokens of ROUGE, credit for a right answer, and the warning where no answer can have any."""

import json
import random
import string

import pytest
import yaml
from rouge_score.tokenizers import DefaultTokenizer

from llm_fed.scoring.rouge import Tokenizer
from llm_fed.scoring.scores import score, without_credit

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


@pytest.mark.parametrize("metric", ["rouge1", "rouge2", "rougeL", "squad_f1", "squad_em", "exact_match"])
def test_who_is_said_to_be_without_credit_scores_0_and_nobody_else_does(metric):
    draws = random.Random(1)
    pieces = ["the", "a", "yes", "…", "。", "!", "😀", "北", "ดี", " ", " ", "é", "\u200b", "", "नि", "-"]
    texts = ["".join(draws.choices(pieces, k=draws.randrange(1, 4))) for _ in range(300)]
    hopeless = {texts[number] for number in without_credit(metric, [(text,) for text in texts])}
    others = [text for text in texts if text not in hopeless]
    assert score(metric, others, [(text,) for text in others]) == pytest.approx(100)
    assert bool(hopeless) == (metric not in ("squad_em", "exact_match"))
    if hopeless:
        assert score(metric, list(hopeless), [(text,) for text in hopeless]) == 0
        assert without_credit(metric, [("!", "yes no"), ("!", "-")]) == [1]  # one reference with credit is enough


def test_a_reference_with_two_answers_is_without_credit():
    assert without_credit("commonsense_accuracy", [("it is true",), ("answer2, not answer1",)]) == [1]


def write(folder, outputs):
    """Two clients whose right answers are these."""
    for client in ("ada", "bob"):
        (folder / client).mkdir(parents=True)
        for split in ("train", "validation", "test"):
            rows = [{"instruction": f"w2{i} w3{i}", "output": output} for i, output in enumerate(outputs)]
            (folder / client / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def hopeless(small, tmp_path_factory):
    """A federation in which a third of the right answers are punctuation alone."""
    folder = tmp_path_factory.mktemp("hopeless")
    tree = small.tree(rounds=1, task={"path": str(write(folder / "data", ["w4 w5", "w6", "。！"]))})
    tree["compare"] = {"rows": {"one": [], "two": ["local.lr=0.01"]}, "seeds": [0, 1]}
    (folder / "c.yaml").write_text(yaml.safe_dump(tree))
    return folder


def warnings_in(text):
    return [line for line in text.splitlines() if line.startswith("warning: ")]


def test_run_and_eval_warn_once_for_each_split_and_before_training(hopeless, llm_fed, tmp_path):
    said = llm_fed("run", hopeless / "c.yaml", "--out", tmp_path / "run")
    assert said.code == 0
    warnings = warnings_in(said.err)
    assert len(warnings) == 2 and "of 6 validation examples" in warnings[0] and "of 6 test examples" in warnings[1]
    for part in ("warning: 2 of 6", "score 0 under rouge1 whatever is answered", "'。！' of client ada", "exact_match"):
        assert part in warnings[0]
    lines = said.err.splitlines()
    assert lines.index(warnings[1]) < next(n for n, line in enumerate(lines) if "round 1/" in line)
    again = llm_fed("eval", tmp_path / "run", "--json")
    assert again.code == 0 and warnings_in(again.err) == warnings
    assert warnings_in(llm_fed("eval", tmp_path / "run", "--metric", "exact_match").err) == []


def test_data_that_can_be_scored_is_not_warned_of(small, llm_fed, tmp_path):
    data = write(tmp_path / "data", ["w4 w5", "北京"])
    config = small.config(tmp_path / "c.yaml", rounds=1, task={"path": str(data)})
    said = llm_fed("run", config, "--out", tmp_path / "run")
    assert said.code == 0 and warnings_in(said.err) == []
