"""What does not fit into `task.max_length` is left out of training and of evaluation, and counted."""

import re
from typing import Any

import pytest
import tiny_base
from byte_tokenizer import byte_tokenizer
from tokenizers import processors

from llm_fed.basics.errors import UserError
from llm_fed.kinds.encoding import Encoder
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.tasks.common import Example, Turn
from llm_fed.tasks.templates import template_of

SHORT, LONG = Example("w2 w3", ("w4",)), Example(" ".join(["w2"] * 9), ("w4",))


def encoder(max_length: int = 6, **settings: Any) -> Encoder:
    task = TaskConfig(max_length=max_length, template="plain", **settings)
    return Encoder(tiny_base.tokenizer(**tiny_base.SPECIAL), Config(task=task))


def test_long_examples_are_left_out_and_counted():
    made = encoder()
    assert made.note() == ""
    assert len(made.training("c", "training", [SHORT, LONG, LONG])) == 1
    assert [query.answers for query in made.queries("c", "test", [LONG, SHORT])] == [("w4",)]
    assert made.note() == "2 training and 1 test examples are longer than 6 tokens and are left out"


def test_a_prompt_of_just_max_length_is_asked():
    """Training needs room for the answer and the end, too."""
    made = encoder(max_length=2)
    assert len(made.queries("c", "test", [SHORT])) == 1
    assert made.training("c", "training", [SHORT]) == [] and "none of its 1 training" in made.none_fits[0]


def test_the_limit_counts_those_that_fit():
    made = encoder()
    assert len(made.queries("c", "test", [LONG, SHORT, LONG, SHORT, SHORT, LONG], limit=2)) == 2
    assert made.skipped["test"] == 2  # what comes after is not looked at


def test_a_client_of_which_nothing_fits_is_named():
    made = encoder()
    assert made.queries("c", "test", [LONG, LONG]) == [] and "none of its 2 test examples" in made.none_fits[0]
    assert encoder().training("c", "validation", [LONG], required=False) == []
    assert encoder().queries("c", "validation", []) == []


def test_what_is_too_long_can_be_cut():
    """Off the response at its end, or off the prompt at its beginning, which is asked so, too."""
    question, answer = Example("w2 w3 w4 w5", ("w6 w7 w8",)), Example(" ".join(["w2"] * 9), ("w4",))
    (whole,), plain = encoder(99).training("c", "training", [question]), encoder(99)
    size = len(whole.input_ids)
    for cut in (1, 2):
        (end,) = encoder(size - cut, too_long="cut-end").training("c", "training", [question])
        assert (end.input_ids, end.target) == (whole.input_ids[:-cut], whole.target[:-cut])
        (start,) = encoder(size - cut, too_long="cut-start").training("c", "training", [question])
        assert (start.input_ids, start.target) == (whole.input_ids[cut:], whole.target[cut:])
    made = encoder(6, too_long="cut-end")
    assert made.training("c", "training", [answer]) == []  # its prompt alone is longer
    assert "none of its 1 training" in made.none_fits[0]
    made = encoder(6, too_long="cut-start")
    (asked,) = made.queries("c", "test", [answer])
    (uncut,) = plain.queries("c", "test", [answer])
    assert asked.prompt == uncut.prompt[-6:] and made.note() == ""


def test_options_follow_a_prompt_that_was_cut():
    options = Example(" ".join(["w2"] * 9), ("w4",), options=("w4", "w5"))
    shorter, longer = encoder(6, too_long="cut-start"), encoder(99)
    (cut,), (whole,) = (made.queries("c", "test", [options]) for made in (shorter, longer))
    assert cut.options == whole.options and len(cut.prompt) == 6


def test_a_template_of_ones_own():
    """Written into the prompt's file by its text, and read back; one that is none is refused with what there is."""
    own = "Question: {prompt}\nAnswer: "
    tokenizer = tiny_base.tokenizer(**tiny_base.SPECIAL)
    task = from_dict({"task": {"template": own}}).task
    (found,) = Encoder(tokenizer, Config(task=task)).training("c", "training", [SHORT])
    before = tokenizer("Question: w2 w3\nAnswer: ").input_ids
    assert found.prompt == before and template_of(own, tokenizer).text == own
    for wrong, said in (
        ("alpacca", "closest is 'alpaca'"),
        ("Question: ", "a text of your own that has {prompt} in it once"),
        ("{prompt} {prompt}", "in it once"),
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            from_dict({"task": {"template": wrong}})


CHAT = "{% for m in messages %}{{ m.role }} {{ m.content }} </s>{% endfor %}{% if add_generation_prompt %}w9{% endif %}"


@pytest.mark.parametrize("template", ["plain", "alpaca", "chat", "own {prompt} w5"])
@pytest.mark.parametrize("ends", [False, True])
def test_lengths_are_those_of_the_tokens(template, ends):
    """Also with a tokenizer that puts EOS behind every text, which is taken off a prompt."""
    tokenizer = tiny_base.tokenizer(**tiny_base.SPECIAL)
    tokenizer.chat_template = CHAT
    if ends:
        around = processors.TemplateProcessing(single="w2 $A </s>", special_tokens=[("w2", 2), ("</s>", 1)])
        tokenizer.backend_tokenizer.post_processor = around
    made = Encoder(tokenizer, Config(task=TaskConfig(max_length=99, template=template)))
    examples = [SHORT, LONG, Example("w3", ("w4 w5", "w6"), options=("w4 w5", "w7")), Example("w8 </s>", ("w9",))]
    lengths, trained = made.lengths(examples), made.training("c", "training", examples)
    assert [length.whole for length in lengths] == [len(each.input_ids) for each in trained]
    assert [length.prompt for length in lengths] == [len(q.prompt) for q in made.queries("c", "test", examples)]


def test_what_is_read_otherwise_and_what_is_not_learned_from():
    """Halves of characters, spellings of control tokens, reasoning, and a message of weight 0, which is counted."""
    made = encoder(99)
    odd = [
        Example("w2 \ud83d", ("w3",)),
        Example("w2", ("</s> w3",)),
        Example("w4 </s> <pad>", ("\udc00",)),
        Example("w5", ("<think> w6 </think> w7",)),
    ]
    assert [query.answers for query in made.queries("c", "test", odd)] == [("w3",), ("</s> w3",), ("\ufffd",), ("w7",)]
    assert made.note() == ""
    talk = (Turn("user", "w2"), Turn("assistant", "w3", trained=False), Turn("user", "w4"))
    assert made.lengths([Example(talk, ("w5",)), Example("w2", ("<think> w6 </think>",))])
    assert made.note() == "1 messages of the assistant (weight=0, train=false) are not learned from"


def test_right_answers_are_as_long_as_they_are_read():
    """What an answer spells like a control token is text, here a byte a token."""
    made = Encoder(byte_tokenizer(), Config(task=TaskConfig(template="plain")), room=lambda prompt: 1)
    assert made.cut(made.queries("c", "test", [Example("w2", ("w3</s>",)), Example("w2", ("w",))])) == [6]


def test_a_token_without_an_embedding_is_named():
    tokenizer = tiny_base.tokenizer(**tiny_base.SPECIAL)
    tokenizer.add_tokens(["<crate>"])
    held = Example("w2 <crate>", ("w4",))
    for template in ("plain", "chat"):
        tokenizer.chat_template = CHAT
        task = TaskConfig(max_length=99, template=template)
        assert len(Encoder(tokenizer, Config(task=task), rows=62).training("c", "training", [SHORT, held])) == 2
        made = Encoder(tokenizer, Config(task=task), rows=61)
        assert len(made.training("c", "training", [SHORT])) == 1
        with pytest.raises(
            UserError, match="the token '<crate>' .number 61., but .* of 61 tokens .*resize_token_embeddings"
        ):
            made.training("c", "training", [SHORT, held])


TALK = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def test_a_conversation_is_asked_for_its_last_turn_as_it_was_trained():
    tokenizer = tiny_base.tokenizer(**tiny_base.SPECIAL)
    tokenizer.chat_template = TALK
    talk = Example((Turn("user", "w2"), Turn("assistant", "w3"), Turn("user", "w4")), ("w5 w6",), ("w5 w6", "w7"))
    made = Encoder(tokenizer, Config(task=TaskConfig(max_length=99, template="chat")))
    (query,), (trained,) = made.queries("c", "test", [talk]), made.training("c", "training", [talk])
    words = tokenizer.convert_ids_to_tokens
    assert words(trained.answer) == ["w5", "w6", "</s>"] and trained.requested == query.prompt
    assert [words(option) for option in query.options] == [["w5", "w6", "</s>"], ["w7", "</s>"]]
    assert sum(trained.target) == 5 and query.example == trained and query.correct == (0,)
    (length,) = made.lengths([talk])
    assert (length.prompt, length.whole) == (len(query.prompt), len(trained.input_ids))


def test_an_example_that_cannot_fill_the_template_is_found_by_its_beginning():
    tokenizer = tiny_base.tokenizer(**tiny_base.SPECIAL)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    made = Encoder(tokenizer, Config(task=TaskConfig(template="chat")))
    talk = Example((Turn("system", "w2"), Turn("user", "Which bay?")), ("w5",))
    with pytest.raises(UserError, match="roles must alternate .the conversation 'system: w2 user: Which bay.'"):
        made.training("c", "training", [talk])
