"""Conversations: what a row may hold, whose tokens count, and a federation that trains on them."""

import json
from typing import Any

import pytest
from byte_tokenizer import EOS, MARKED, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from talks import encode_conversation

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks import files
from llm_fed.tasks.common import Turn
from llm_fed.tasks.conversations import turns_of

PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
FORGETS = "{% for m in messages[-2:] %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"  # rewrites earlier turns
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
    {"role": "assistant", "content": "6"},
]
texts = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)


def trained(template: str, turns: Any) -> str:
    """What counts in the loss, its parts one after another."""
    tokenizer = byte_tokenizer(chat_template=template)
    found = encode_conversation(turns, tokenizer, template="chat")
    return tokenizer.decode([id for id, counts in zip(found.input_ids, found.target, strict=True) if counts])


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marks", "prefixes"])
def test_every_turn_of_the_assistant_counts_with_its_end(template):
    assert trained(template, turns_of(TALK, "here", "messages")) == "4</s>6</s>"


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=10), st.booleans())
def test_prefixes_find_what_marks_say(pairs, system):
    """Ten turns as transformers masks them by generation marks, which is what TRL trains on."""
    turns = [Turn("system", "Be short.")] * system
    for question, answer in pairs:
        turns += [Turn("user", question), Turn("assistant", answer)]
    marked, plain = byte_tokenizer(chat_template=MARKED), byte_tokenizer(chat_template=PLAIN)
    one = encode_conversation(turns, marked, template="chat")
    other = encode_conversation(turns, plain, template="chat")
    stock: Any = marked.apply_chat_template(
        [turn._asdict() for turn in turns], return_assistant_tokens_mask=True, return_dict=True
    )
    assert one == other or (one.input_ids, one.target) == (other.input_ids, other.target)
    assert one.input_ids == stock["input_ids"] and one.target == [bool(each) for each in stock["assistant_masks"]]


def test_a_model_learns_to_stop_where_the_template_writes_no_end():
    bare = PLAIN.replace("</s>", "").replace("{{ '|' }}", "")
    turns = turns_of(TALK[1:3], "here", "messages")
    found = encode_conversation(turns, byte_tokenizer(chat_template=bare), template="chat")
    assert found.input_ids[-1] == EOS and found.target[-1] and trained(bare, turns) == "4</s>"


def test_what_cannot_be_trained_on_is_refused():
    turns = turns_of(TALK, "here", "messages")
    with pytest.raises(UserError, match="does not write the assistant's message '4' as it stands"):
        encode_conversation(turns, byte_tokenizer(chat_template=FORGETS), template="chat")
    with pytest.raises(UserError, match="cannot be applied to a conversation: no system"):
        encode_conversation(turns, byte_tokenizer(chat_template="{{ raise_exception('no system') }}"), template="chat")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hello", "holds no list of messages"),
        ([], "holds no list of messages"),
        ([{"role": "user"}], "message 1 .* needs a role .* and a text"),
        ([{"role": "narrator", "content": "x"}], "message 1 .* needs a role"),
        ([["user", "x"]], "message 1 .* needs a role"),
        (TALK[:2], "does not end with a message of the assistant"),
        (TALK[:1], "does not end with a message of the assistant"),
        (TALK[2:], "a message of the assistant where one of the user belongs"),
        ([*TALK[:3], TALK[2]], "a message of the assistant where one of the user belongs"),
        ([TALK[1], TALK[0], TALK[2]], "a message of the system where one of the assistant belongs"),
    ],
)
def test_bad_conversations_are_named_with_file_and_line(tmp_path, value, said):
    rows = [{"messages": TALK}, {"messages": value}]
    (tmp_path / "ada.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=f"ada.jsonl, line 2.*{said}"):
        files.load(TaskConfig(name="files", path=str(tmp_path)), 0)


def with_fields(*, number: int = 2, **fields: Any) -> list[dict[str, Any]]:
    """The conversation, with these fields in one of its messages."""
    return [{**message, **fields} if place == number else message for place, message in enumerate(TALK)]


@pytest.mark.parametrize(
    "fields", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": 0}, {"weight": 1, "train": False}]
)
def test_a_message_that_is_not_learned_from(fields):
    turns = turns_of(with_fields(**fields), "here", "messages")
    assert [turn.trained for turn in turns] == [True, True, False, True, True]
    found = encode_conversation(turns, byte_tokenizer(chat_template=PLAIN), template="chat")
    assert (
        found.input_ids
        == encode_conversation(
            turns_of(TALK, "here", "messages"), byte_tokenizer(chat_template=PLAIN), template="chat"
        ).input_ids
    )
    assert sum(found.target) == len("6") + 1
    cut = turns_of(with_fields(number=4, **fields), "here", "messages")
    assert cut == turns_of(TALK[:3], "here", "messages")  # what comes after the last that is trained does not matter


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (with_fields(weight=0.5), "message 3 .* has weight=0.5; it may be 0 .not learned from. or 1"),
        (with_fields(weight="0"), "message 3 .* has weight='0'"),
        (with_fields(train="no"), "message 3 .* has train='no'"),
        (with_fields(number=1, train=True), "message 2 .* is of the user and has train=true; only the assistant's"),
        ([{**m, "weight": 0} for m in TALK], "has no message of the assistant to be learned from; all say weight=0"),
        (
            with_fields(tool_calls=[{"name": 5}]),
            "message 3 .* calls the tool .*; a call is {function: {name, arguments}}",
        ),
        ([TALK[1], {"role": "tool", "content": "x"}, TALK[2]], "a message of the tool where one of the assistant"),
        ([*TALK[:2], {"role": "assistant", "content": None}], "message 3 .* needs a role"),
    ],
)
def test_fields_that_cannot_be_honoured_are_named(value, said):
    with pytest.raises(UserError, match=f"here: .*{said}"):
        turns_of(value, "here", "messages")


def test_fields_that_a_template_reads():
    """Calls of tools are objects as templates want them, and reasoning stands before the answer."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    talk = [
        TALK[1], {"role": "assistant", "content": None, "tool_calls": [call], "name": "ignored"},
        {"role": "tool", "tool_call_id": "a", "content": "4", "tool_calls": None},
        {"role": "assistant", "content": "4", "reasoning_content": "So it is.", "tool_calls": []},
    ]  # fmt: skip
    _, asked, told, last = turns_of(talk, "here", "messages")
    wanted = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}, "id": "a"}
    assert asked.content == "" and json.loads(asked.fields)["tool_calls"] == [wanted]
    assert json.loads(told.fields) == {"tool_call_id": "a"} and told.role == "tool"
    assert last == Turn("assistant", "<think>\nSo it is.\n</think>\n\n4")
    old = turns_of([TALK[1], {"role": "assistant", "content": "", "function_call": {"name": "f"}}], "here", "messages")
    assert json.loads(old[-1].fields)["tool_calls"] == [{"type": "function", "function": {"name": "f"}}]


def test_rows_of_both_kinds_become_the_same_examples(tmp_path):
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in TALK
    ]
    (tmp_path / "ada.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    (tmp_path / "bob.jsonl").write_text(json.dumps({"conversations": shared}) + "\n")
    (tmp_path / "cyd.jsonl").write_text(json.dumps({"talk": TALK}) + "\n")
    with pytest.raises(UserError, match="no column for the prompt among talk"):
        files.load(TaskConfig(name="files", path=str(tmp_path)), 0)
    (tmp_path / "cyd.jsonl").unlink()
    data = files.load(TaskConfig(name="files", path=str(tmp_path)), 0)
    ((one,), (other,)) = (client.train for client in data.clients.values())
    assert one.prompt == other.prompt and one.answers == other.answers == ("6",)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/cyd.jsonl").write_text(json.dumps({"talk": TALK}) + "\n")
    named = TaskConfig(name="files", path=str(tmp_path / "own"), columns=ColumnsConfig(messages="talk"))
    assert files.load(named, 0).clients["cyd"].train[0].prompt == one.prompt
