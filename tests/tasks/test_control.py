"""Data stay text: what they spell like a control token has the tokens of text, and all else has the tokenizer's own."""

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_base
from byte_tokenizer import BOS, EOS, byte_tokenizer
from odd_tokenizers import tokenizers
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from llm_fed.basics.errors import UserError
from llm_fed.tasks.common import Example
from llm_fed.tasks.control import Marks, SafeTokenizer, answer_of, control_tokens, reasoning, without_surrogates
from llm_fed.tasks.templates import encode_prompt, encoded, template_of

KINDS = sorted(tokenizers())
PIECES = ("a", "Bay 4.", "\n", "  ", "</s>", "<s>", "<|im_end|>", "<end_of_turn>", "é", "🙂", "<b>", "12", "東京", " ")


def read(safe: SafeTokenizer, text: str) -> list[int]:
    marks = Marks(safe.spelled, [text])
    (ids,) = safe.encode([marks.hide(text, safe.pattern)], marks)
    return ids


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    return ["".join(draw.choices(PIECES, k=draw.randint(0, 9))) for _ in range(count)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
def test_spellings_are_read_as_with_split_special_tokens(kind):
    tokenizer, _ = tokenizers()[kind]
    safe = SafeTokenizer(tokenizer, "")
    for text in texts(100):
        if "<think>" not in text:
            expected = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
            found = read(safe, text)
            forged = {tokenizer.convert_tokens_to_ids(name) for name in safe.spelled} - {tokenizer.unk_token_id}
            assert not forged & {*found}
            assert found == expected or forged & {*expected}, text  # Unigram's vocabulary holds `</s>` as a word, too


@pytest.mark.parametrize("kind", KINDS)
def test_other_texts_have_the_tokenizers_own_tokens(kind):
    tokenizer, _ = tokenizers()[kind]
    safe = SafeTokenizer(tokenizer, "")
    plain = [text for text in texts(300) if safe.is_plain(text)]
    assert len(plain) > 40
    for text in plain:
        assert read(safe, text) == tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_ends_a_token_and_what_is_before_it_is_read_alone(kind):
    tokenizer, _ = tokenizers()[kind]
    safe = SafeTokenizer(tokenizer, "")
    draw = random.Random(1)
    for text in texts(100):
        marks = Marks(safe.spelled, [text])
        marked = marks.hide(text, safe.pattern)
        cut = draw.randint(0, len(marked))
        before, behind = safe.encode([marked[:cut], marked[cut:]], marks)
        (alone,), (whole,) = safe.encode([marked[:cut]], marks), safe.encode([marked], marks)
        assert before == alone, (text, cut)
        if kind not in ("words", "unigram"):  # these do not write every text
            assert tokenizer.decode([*before, *behind]) == tokenizer.decode(whole)


def test_what_a_template_writes_is_a_control_token_and_what_is_hidden_is_not():
    tokenizer = byte_tokenizer()
    safe = SafeTokenizer(tokenizer, "")
    marks = Marks(safe.spelled, ["</s>"])
    found = safe.encode(["<s>", marks.hide("</s>", safe.pattern), "</s>"], marks)
    assert found == [[BOS], tokenizer("</s>", split_special_tokens=True).input_ids, [EOS]]


def test_private_use_characters_of_the_data_stay_what_they_are():
    """Fonts put icons there; a text with those of one block is marked with those of another."""
    safe = SafeTokenizer(byte_tokenizer(), "")
    for icons in ("\U00108000</s>\U00108001", "\U00100000\U00108000</s>", "\U000f0000 \U000f8000 \U00100000"):
        assert safe.tokenizer.decode(read(safe, icons)) == icons
    with pytest.raises(UserError, match="all of Unicode's private-use characters"):
        read(safe, "\U000f0000\U000f8000\U00100000\U00108000")


@pytest.mark.parametrize(
    ("token", "template", "controls"),
    [
        (AddedToken("<x>", special=True), "", True),
        (AddedToken("<table>", special=False), "<table>", False),  # a word of Gemma's
        (AddedToken("\n\n", special=False), "\n\n", False),
        (AddedToken("\n", special=True), "", False),
        (AddedToken("[USER]", special=False), "", False),
        (AddedToken("[USER]", special=False), "[USER]{{ m.content }}", True),
        (AddedToken("<\uff5cUser\uff5c>", special=False), "", True),  # DeepSeek's, which are not declared as special
        (AddedToken("<|user|>", special=False), "{{ '<|' + m.role + '|>' }}", True),  # Phi's, put together
    ],
)
def test_which_tokens_are_control_tokens(token, template, controls):
    tokenizer = byte_tokenizer()
    (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)(
        {"additional_special_tokens": [token]} if token.special else [token]
    )
    assert (token.content in control_tokens(tokenizer, template)) is controls
    prompt = encode_prompt(f"a{token.content}b", tokenizer, template=f"{template}{{prompt}}")
    of_data = prompt.count(tokenizer.convert_tokens_to_ids(token.content)) - template.count(token.content)
    assert of_data == (not controls)


def test_a_template_of_ones_own_that_begins_with_bos_has_one():
    for around, text in (("<s> $A", "<s>Q {prompt}\n"), ("<s> $A", "Q {prompt}\n"), ("$A", "<s>Q {prompt}\n")):
        tokenizer = byte_tokenizer(around)
        ids = encode_prompt("a<s>b", tokenizer, template=text)
        assert ids.count(BOS) == 1 and tokenizer.decode(ids) == "<s>Q a<s>b\n"
    assert template_of("<s>Q {prompt}", byte_tokenizer("<s> $A")).text == "Q {prompt}"
    assert template_of("<s>Q {prompt}", byte_tokenizer()).text == "<s>Q {prompt}"


def test_halves_of_characters_become_replacement_characters():
    tokenizer = byte_tokenizer()
    found = encoded(Example("crate \ud83d", ("\udc00 bay",)), tokenizer, "plain")
    assert tokenizer.decode(found.input_ids) == "crate \ufffd\n\ufffd bay</s>"
    assert without_surrogates("\ud83d\ude42 \U0001f642") == "\ufffd\ufffd \U0001f642"


@pytest.mark.parametrize(
    ("reply", "answer", "generated"),
    [
        ("4", "4", "4"),
        ("<think>\nwe\n</think>\n\n4", "4", "4"),
        ("\n<think></think>4 </think>", "4 </think>", "4 </think>"),
        ("we add\n</think>\n\n4", "4", "we add\n</think>\n\n4"),  # a prompt opened it; generated, it would be seen
        ("Use </think> here.", "Use </think> here.", "Use </think> here."),
        ("\n\n</think>\n4", "\n\n</think>\n4", "\n\n</think>\n4"),
        ("It is <think>x</think>", "It is <think>x</think>", "It is <think>x</think>"),
        ("<think> without end", "<think> without end", ""),
    ],
)
def test_where_an_answer_begins_behind_its_reasoning(reply, answer, generated):
    assert reply[reasoning(reply) :] == answer and answer_of(reply) == generated


def test_a_tokenizer_in_python_is_refused_in_words():
    """It does not say where its tokens are."""
    slow: Any = SimpleNamespace(
        is_fast=False, name_or_path="slow", added_tokens_decoder={}, all_special_tokens=["</s>"]
    )
    slow.convert_tokens_to_ids, slow.unk_token_id = ord, None
    with pytest.raises(UserError, match=re.escape("(SimpleNamespace) does not say where in a text a token is; choose")):
        read(SafeTokenizer(slow, ""), "a</s>b")


def test_a_vocabulary_that_holds_its_control_tokens_as_words():
    """The word level knows `</s>` as a word; broken in two, it is no word that the vocabulary has."""
    tokenizer: PreTrainedTokenizerFast = tiny_base.tokenizer(**tiny_base.SPECIAL)
    ids = encode_prompt("w3 </s> w4", tokenizer, template="plain")
    assert ids == [3, 2, 2, 4]  # w2 stands for unknown words
