"""What of a chat template's rendering is prompt and what is target, on templates of every kind, and with tools."""

import random
from typing import Any

import datasets
import pytest
import talks
import tiny
from byte_tokenizer import MARKED, byte_tokenizer
from chat_forms import FORMS, form_for
from odd_tokenizers import tokenizers
from talks import encode_conversation

from llm_fed.basics.errors import UserError
from llm_fed.tasks.common import Encoded, Example, Turn
from llm_fed.tasks.conversations import turns_of
from llm_fed.tasks.templates import encode_prompt, encoded, filled, template_of

ASKED, SAID = Turn("user", "Which bay?"), Turn("assistant", "Bay 4.")
TALK = [ASKED, SAID, Turn("user", "And its lid?"), Turn("assistant", "Shelf 2.")]
BLOCK = "<think>\n\n</think>\n\n"
CHATML = "<|im_start|>user\nWhich bay?<|im_end|>\n<|im_start|>assistant\n"


def parts(found: Encoded, tokenizer: Any) -> list[tuple[str, bool]]:
    """The text in pieces, and of each whether it is a target."""
    pieces: list[tuple[str, bool]] = []
    for place, target in enumerate(found.target):
        before = str(tokenizer.decode(found.input_ids[:place]))
        text = str(tokenizer.decode(found.input_ids[: place + 1]))[len(before) :]
        if pieces and pieces[-1][1] == target:
            pieces[-1] = (pieces[-1][0] + text, target)
        else:
            pieces.append((text, target))
    return pieces


def with_form(name: str, kind: str = "bytes") -> Any:
    """A tokenizer with a chat template."""
    tokenizer, style = tokenizers()[kind]
    tokenizer.chat_template = form_for(name, style).text
    return tokenizer


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("chatml", [(CHATML, False), ("Bay 4.<|im_end|>", True), ("\n", False)]),
        ("thinks unless told", [(CHATML + BLOCK, False), ("Bay 4.<|im_end|>", True), ("\n", False)]),
        ("always thinks", [(CHATML + BLOCK, False), ("Bay 4.<|im_end|>", True), ("\n", False)]),
        ("thought is gone", [(CHATML, False), ("Bay 4.<|im_end|>", True), ("\n", False)]),
        ("with marks around the header", [(CHATML, False), ("Bay 4.<|im_end|>", True), ("\n", False)]),
        ("zephyr", [(CHATML.replace("user", "user>").replace("assistant", "assistant>"), False),
                    ("Bay 4.<|im_end|>", True), ("\n", False)]),
        ("mistral", [("[INST] Which bay? [/INST]", False), (" Bay 4.<|im_end|>", True)]),
        ("no end", [("### user\nWhich bay?\n### assistant\n", False), ("Bay 4.<|endoftext|>", True)]),
        ("starts alone", [("<|im_start|>user Which bay?<|im_start|>assistant ", False), ("Bay 4.<|endoftext|>", True)]),
        ("llama-2", [("[INST] Which bay? [/INST]", False), (" Bay 4. <|im_end|>", True)]),
    ],
)  # fmt: skip
def test_what_the_template_writes_is_prompt_and_the_end_is_learned(name, written):
    """The tokenizer's EOS is <|endoftext|>, and a turn ends with <|im_end|>. An open block of reasoning is closed as
    the template does it; white space that is in one token with the reply is the reply's."""
    tokenizer = with_form(name)
    found = encode_conversation([ASKED, SAID], tokenizer, template="chat")
    assert parts(found, tokenizer) == written
    assert found == encoded(Example(ASKED.content, (SAID.content,)), tokenizer, "chat")
    assert found.requested == encode_prompt(ASKED.content, tokenizer, template="chat")
    ends = [] if written[-1][0].endswith("<|endoftext|>") else ["<|im_end|>"]
    assert filled("chat", tokenizer).ends == tokenizer.convert_tokens_to_ids(ends)


def test_earlier_turns_are_found_in_the_final_rendering():
    tokenizer = with_form("thinks unless told")
    found = encode_conversation(TALK, tokenizer, template="chat")
    assert [text for text, target in parts(found, tokenizer) if target] == ["Bay 4.<|im_end|>", "Shelf 2.<|im_end|>"]
    text = tokenizer.decode(found.input_ids)
    assert "assistant\nBay 4." in text and f"assistant\n{BLOCK}Shelf 2." in text
    assert found.requested == encode_prompt(TALK[:3], tokenizer, template="chat")


@pytest.mark.parametrize("name", ["chatml", "with marks", "phi"])
def test_a_reply_that_begins_with_a_line_break(name):
    """With the header's it is one token, unless the prompt's tokens stay those of an evaluation."""
    tokenizer = with_form(name)
    reply = "\nBay 4."
    found = encode_conversation([ASKED, Turn("assistant", reply)], tokenizer, template="chat")
    whole = tokenizer(tokenizer.decode(found.input_ids), add_special_tokens=False).input_ids
    assert len(found.input_ids) == len(whole) + 1  # as two tokens
    assert [text for text, target in parts(found, tokenizer) if target] == [f"{reply}<|im_end|>"]
    assert found.requested == encode_prompt(ASKED.content, tokenizer, template="chat")


def test_reasoning_is_trained_where_the_template_keeps_it():
    reply = Turn("assistant", "<think>\nBy the door.\n</think>\n\nBay 4.")
    kept = {name: f"{reply.content}<|im_end|>" for name in ("chatml", "thinks unless told", "mistral")}
    for name, said in (
        kept.items() | {"always thinks": "Bay 4.<|im_end|>", "thought is gone": "Bay 4.<|im_end|>"}.items()
    ):
        tokenizer = with_form(name)
        found = encode_conversation([ASKED, reply], tokenizer, template="chat")
        assert [text.lstrip(" ") for text, target in parts(found, tokenizer) if target] == [said]
        tags = tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        assert [found.input_ids.count(tag) for tag in tags] == [1 - (name == "thought is gone")] * 2
    tokenizer = with_form("thinks unless told")
    earlier = encode_conversation([ASKED, reply, *TALK[2:]], tokenizer, template="chat")
    assert [text for text, target in parts(earlier, tokenizer) if target] == ["Bay 4.<|im_end|>", "Shelf 2.<|im_end|>"]


def test_tags_of_reasoning_that_somebody_only_mentions_are_text():
    for name in ("chatml", "thinks unless told", "always thinks"):
        tokenizer = with_form(name)
        turns = [Turn("user", "What is <think>?"), Turn("assistant", "It ends with </think>.")]
        found = encode_conversation(turns, tokenizer, template="chat")
        assert [text for text, target in parts(found, tokenizer) if target] == ["It ends with </think>.<|im_end|>"]
        written = 0 if name == "chatml" else 1
        assert found.input_ids.count(tokenizer.convert_tokens_to_ids("</think>")) == written


def test_a_system_text_stands_before_the_first_question_where_the_template_takes_none():
    turns = [Turn("system", "Be short."), *TALK]
    merged = [ASKED._replace(content="Be short.\n\nWhich bay?"), *TALK[1:]]
    for name in ("gemma", "mistral", "llama-2"):  # two refuse it, and one drops it
        tokenizer = with_form(name)
        found = encode_conversation(turns, tokenizer, template="chat")
        assert found == encode_conversation(merged, tokenizer, template="chat")
        assert encode_prompt(turns[:-1], tokenizer, template="chat") == found.requested
    tokenizer = with_form("chatml")
    assert encode_conversation(turns, tokenizer, template="chat") != encode_conversation(
        merged, tokenizer, template="chat"
    )


def test_marks_that_leave_out_the_end_or_a_turn():
    """A model must learn to end its turn; a turn without marks is none of the assistant's."""
    tokenizer, style = tokenizers()["bytes"]
    tokenizer.chat_template = form_for("with marks", style).text.replace(
        "{{ m.content }}<|im_end|>{% endgeneration %}", "{{ m.content }}{% endgeneration %}<|im_end|>"
    )
    found = encode_conversation(TALK, tokenizer, template="chat")
    assert [text for text, target in parts(found, tokenizer) if target] == ["Bay 4.<|im_end|>", "Shelf 2.<|im_end|>"]
    tokenizer.chat_template = form_for("with marks", style).text.replace(
        "m.role == 'assistant'", "m.role == 'assistant' and loop.last"
    )
    found = encode_conversation(TALK, tokenizer, template="chat")
    assert [text for text, target in parts(found, tokenizer) if target] == ["Shelf 2.<|im_end|>"]


def test_a_template_is_changed_only_where_its_prompt_goes_on_in_another_way():
    changed = {"thinks unless told", "always thinks", "thought is gone", "zephyr"}
    for name in FORMS:
        tokenizer = with_form(name)
        text = template_of("chat", tokenizer).text
        assert (text != tokenizer.chat_template) is (name in changed), name
        asked: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": ASKED.content}],
            chat_template=text,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert asked == encode_prompt(ASKED.content, tokenizer, template="chat")  # so any server can ask


def test_a_template_that_asks_for_today_gets_a_day_that_stays():
    day = "{{ strftime_now('%d %B %Y') }}|{% set form = '%d %B %Y' %}{{ strftime_now(form) }}|"
    tokenizer = byte_tokenizer(chat_template="{% for m in messages %}" + day + "{{ m.content }}</s>{% endfor %}")
    assert tokenizer.decode(encode_prompt("hi", tokenizer, template="chat")) == "26 July 2024|26 July 2024|hi</s>"


def test_the_templates_own_line_breaks_stay_when_it_is_changed():
    """Jinja takes off a line break behind a block, and the last one of a template."""
    asked = "{% if add_generation_prompt %}<think>\n{% endif %}\n"
    text = "\n {% for m in messages %}\n{{ m.content }}</s>{% endfor %}\n" + asked
    tokenizer = byte_tokenizer(chat_template=text)
    stock = str(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False))
    assert template_of("chat", tokenizer).text != text
    assert tokenizer.decode(encode_prompt("hi", tokenizer, template="chat")) == stock


# Tools

CALL = {"type": "function", "function": {"name": "find", "arguments": '{"crate": "<|im_end|>7"}'}}
WITH_TOOLS = [
    {"role": "user", "content": "Which bay?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "find", "content": "4<|im_end|>"},
    {"role": "assistant", "content": "Bay 4."},
]
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% if m.content %}{{ '\n' }}{% endif %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_of_tools_are_targets_and_what_tools_say_is_not():
    tokenizer, _ = tokenizers()["bytes"]
    tokenizer.chat_template = TOOLS
    turns = turns_of(WITH_TOOLS, "here", "messages")
    found = encode_conversation(turns, tokenizer, template="chat")
    call = '<tool_call>{"name": "find", "arguments": {"crate": "<|im_end|>7"}}</tool_call><|im_end|>'
    assert [text for text, target in parts(found, tokenizer) if target] == [call, "Bay 4.<|im_end|>"]
    assert found.input_ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 4
    assert found.requested == encode_prompt(turns[:-1], tokenizer, template="chat")
    spoken = [turns[0], turns[1]._replace(content="Let me see.")]
    found = encode_conversation(spoken, tokenizer, template="chat")
    assert [text for text, target in parts(found, tokenizer) if target] == [f"Let me see.\n{call}"]


def test_tools_that_a_template_does_not_take_are_refused_in_words():
    turns = turns_of(WITH_TOOLS, "here", "messages")
    tokenizer = with_form("chatml")
    with pytest.raises(UserError, match="does not write the call of the tool 'find'; leave .* whose template does"):
        encode_conversation(turns, tokenizer, template="chat")
    plain = [turns[0], turns[1]._replace(content="Wait.", fields=""), *turns[2:]]
    tokenizer.chat_template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match="does not write messages of a tool"):
        encode_conversation(plain, tokenizer, template="chat")
    with pytest.raises(UserError, match="'alpaca' has no place for calls of tools; set task.template=chat"):
        encode_conversation(turns, tokenizer, template="alpaca")


def test_what_a_reply_spells_changes_no_prompt():
    tokenizer, style = tokenizers()["words"]  # which holds control tokens as words, too
    tokenizer.chat_template = form_for("chatml", style).text
    turns = [Turn("user", "model <unk>"), Turn("assistant", "Bay </s> 4")]
    prompt = encode_prompt(turns[:1], tokenizer, template="chat")
    assert encode_conversation(turns, tokenizer, template="chat").requested == prompt


# The generator


@pytest.mark.parametrize("case", talks.cases(), ids=lambda case: case[0])
def test_a_few_conversations_of_every_tokenizer_in_every_template(case):
    for number in range(4):
        talks.attempt(case, random.Random(f"test-{number}"))


@pytest.mark.slow
def test_many_conversations():
    for number, case in enumerate(talks.cases()):
        for again in range(100):
            talks.attempt(case, random.Random(f"slow-{number}-{again}"))


# Against TRL's own trainer, where TRL is installed (`pip install trl`); llm_fed does not need it


def conversations() -> list[list[dict[str, str]]]:
    """Ten of one to five pairs of turns, every other one with a system message."""
    draws, found = random.Random(0), []
    for number in range(10):
        talk = [{"role": "system", "content": "Be short."}] * (number % 2)
        for _ in range(1 + number // 2):
            asked, told = ("".join(draws.choices("abc 123", k=draws.randint(1, 9))) + "." for _ in range(2))
            talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
        found.append(talk)
    return found


def test_ten_conversations_have_the_tokens_and_the_loss_of_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    talks, tokenizer = conversations(), byte_tokenizer(chat_template=MARKED)
    settings = trl.SFTConfig(
        str(tmp_path), assistant_only_loss=True, max_length=None, use_cpu=True, report_to="none", bf16=False
    )
    data = datasets.Dataset.from_dict({"messages": talks})
    model: Any = tiny.build("llama", vocab_size=len(tokenizer))
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    for talk, stock in zip(talks, trainer.train_dataset, strict=True):
        (batch,) = [trainer.data_collator([stock])]
        ours = encode_conversation([Turn(**turn) for turn in talk], tokenizer, template="chat")
        assert ours.input_ids == batch["input_ids"][0].tolist() == list(stock["input_ids"])
        assert ours.target == [label != -100 for label in batch["labels"][0].tolist()]
        assert sum(ours.target) > 2 * sum(turn["role"] == "assistant" for turn in talk)
