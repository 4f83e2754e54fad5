"""Tasks: tokens and their loss mask, the table of tasks."""

import pytest
from byte_tokenizer import BOS, EOS, byte_tokenizer
from transformers import PreTrainedTokenizerFast

from llm_fed import tasks
from llm_fed.basics.errors import UserError
from llm_fed.kinds.encoding import Encoder
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.tasks.common import TEMPLATES, Encoded, Example
from llm_fed.tasks.templates import encode_prompt, encoded

CHAT = "{% for m in messages %}<s>{{ m.content }}|{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


# Tokens


def encode(
    example: Example, tokenizer: PreTrainedTokenizerFast, *, template: str, max_length: int, loss_on: str
) -> Encoded | None:
    config = TaskConfig(template=template, max_length=max_length, loss_on=loss_on)
    return next(iter(Encoder(tokenizer, Config(task=config)).training("a", "training", [example])))


@pytest.mark.parametrize("around, bos", [("$A", False), ("<s> $A", True), ("<s> $A </s>", True)])
def test_encode_marks_response_and_eos_and_starts_as_the_tokenizer_does(around, bos):
    tokenizer = byte_tokenizer(around)
    example = Example("2+2?", ("four", "4"))
    found = encode(example, tokenizer, template="alpaca-short", max_length=99, loss_on="response")
    prompt = "### Instruction:\n2+2?\n\n### Response:\n"
    assert tokenizer.decode(found.input_ids) == "<s>" * bos + prompt + "four</s>"
    assert found.input_ids.count(BOS) == bos and found.input_ids.count(EOS) == 1
    assert found.target == [False] * (bos + len(prompt)) + [True] * len("four.")


def test_loss_on_all_counts_every_token_but_the_first():
    found = encode(Example("ab", ("c",)), byte_tokenizer(), template="plain", max_length=9, loss_on="all")
    assert found.target == [False, True, True, True, True]  # a, b, newline, c, EOS


@pytest.mark.parametrize("template", TEMPLATES)
def test_training_generation_and_option_scoring_see_the_same_prompt(template):
    tokenizer = byte_tokenizer("<s> $A", CHAT)
    prompt = encode_prompt("Which {one}?", tokenizer, template=template)
    trained = encode(
        Example("Which {one}?", ("left",)), tokenizer, template=template, max_length=999, loss_on="response"
    )
    scored = encoded(Example("Which {one}?", ("right",)), tokenizer, template)
    assert trained.input_ids[: trained.target.index(True)] == prompt
    assert scored.input_ids[: scored.target.index(True)] == prompt
    assert "Which {one}?" in tokenizer.decode(prompt)
    assert prompt.count(BOS) == 1


def test_chat_template_is_the_tokenizers_and_knows_no_today():
    tokenizer = byte_tokenizer(chat_template=CHAT.replace("A:", "{{ date_string }} A:"))
    assert tokenizer.decode(encode_prompt("hi", tokenizer, template="chat")) == "<s>hi|26 Jul 2024 A:"


def test_encode_refuses_what_it_cannot_do():
    with pytest.raises(UserError, match="no chat template; use task.template=alpaca-short"):
        encode_prompt("hi", byte_tokenizer(), template="chat")
    with pytest.raises(UserError, match="task.template='alpaca_short' is unknown .the closest is 'alpaca-short'"):
        encode_prompt("hi", byte_tokenizer(), template="alpaca_short")
    with pytest.raises(UserError, match="task.loss_on='answer' is unknown; known: response, all"):
        encode(Example("a", ("b",)), byte_tokenizer(), template="plain", max_length=9, loss_on="answer")
    endless = byte_tokenizer()
    endless.eos_token = None
    with pytest.raises(UserError, match="no EOS token"):
        encoded(Example("hi", ("you",)), endless, "plain")


# The table


def test_unknown_task_names_the_closest():
    with pytest.raises(UserError, match="task.name='flann' is unknown .the closest is 'flan'.*files"):
        tasks.load(TaskConfig(name="flann"), 0)
