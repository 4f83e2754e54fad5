"""Conversations: rows of messages, and their tokens, in which every turn of the assistant counts in the loss.

A row of `messages` (OpenAI, TRL), and one of `conversations` (ShareGPT); both may begin with a system message:

{"messages": [{"role": "user", "content": "Which ward?"}, {"role": "assistant", "content": "Surgery."}]}
{"conversations": [{"from": "human", "value": "Which ward?"}, {"from": "gpt", "value": "Surgery."}]}
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from llm_fed.errors import UserError, one_line
from llm_fed.tasks.common import Encoded, Example, Template, Turn, encode_continuation, template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "human": "user", "gpt": "assistant"}
MARK = "{% generation %}"  # how a chat template says what the assistant writes


def turns_of(value: Any, where: str, column: str) -> tuple[Turn, ...]:
    """The messages in one column of a row.

    Raises:
        UserError: they are none, or not in the order system (perhaps), user, assistant, user, ..., assistant.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {column!r} holds no list of messages; a message is {{role, content}}")
    turns = []
    for number, message in enumerate(value, 1):
        role, content = _parts(message)
        if ROLES.get(str(role)) is None or not isinstance(content, str) or not content.strip():
            raise UserError(
                f"{where}: message {number} in column {column!r} is {one_line(repr(message))[:80]}; it needs a role "
                f"({', '.join(ROLES)}) and a text"
            )
        turns.append(Turn(ROLES[str(role)], content))
    spoken = turns[1:] if turns[0].role == "system" else turns
    for number, turn in enumerate(spoken):
        expected = ("user", "assistant")[number % 2]
        if turn.role != expected:
            raise UserError(
                f"{where}: column {column!r} has a message of the {turn.role} where one of the {expected} belongs; "
                "user and assistant must alternate, after an optional system message"
            )
    if not spoken or spoken[-1].role != "assistant":
        raise UserError(f"{where}: column {column!r} does not end with a message of the assistant, to be learned from")
    return tuple(turns)


def _parts(message: Any) -> tuple[Any, Any]:
    if not isinstance(message, dict):
        return None, None
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    return role.strip().casefold() if isinstance(role, str) else role, _joined(content)


def _joined(content: Any) -> Any:
    """The text of a content in parts, `[{"type": "text", "text": ...}]`; anything else as it is."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return content
    return "".join(map(str, texts))


def encoded(example: Example, tokenizer: PreTrainedTokenizerBase, template: str | Template) -> Encoded:
    """The example with its first answer: prompt and response, or a conversation of which every turn of the assistant is
    a response."""
    if isinstance(example.prompt, str):
        return encode_continuation(example.prompt, example.answers[0], tokenizer, template=template)
    turns = (*example.prompt, Turn("assistant", example.answers[0]))
    return encode_conversation(turns, tokenizer, template=template)


def encode_conversation(
    turns: Sequence[Turn], tokenizer: PreTrainedTokenizerBase, *, template: str | Template
) -> Encoded:
    """The whole conversation as the chat template writes it; what the assistant writes is the target.

    A template with generation marks says itself what that is. Of another one it is what each turn adds to the
    conversation before it, up to its EOS; a template that rewrites earlier turns is refused. Where the last turn does
    not end with EOS, that is added, so that a model learns to stop.

    Raises:
        UserError: the template is no chat template, fails, or rewrites earlier turns.
    """
    if isinstance(template, str):
        template = template_of(template, tokenizer)
    if template.date is None:
        what = "set task.template=chat" if tokenizer.chat_template else (
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template either, so choose an instruction-tuned "
            "base"
        )  # fmt: skip
        raise UserError(f"the data are conversations, and the template {template.name!r} is for single prompts; {what}")
    apply: Any = partial(
        tokenizer.apply_chat_template, chat_template=template.text, date_string=template.date, return_dict=True
    )
    messages = [turn._asdict() for turn in turns]
    try:
        if MARK in template.text.replace("{%-", "{%").replace("-%}", "%}"):
            found = apply(messages, return_assistant_tokens_mask=True)
            ids, target = list(found["input_ids"]), [bool(one) for one in found["assistant_masks"]]
        else:
            ids, target = _by_prefixes(messages, tokenizer, apply)
    except TemplateError as error:
        raise UserError(f"the chat template cannot be applied to a conversation: {one_line(str(error))}") from error
    last = max((place for place, counts in enumerate(target) if counts), default=None)
    if last is None:
        raise UserError("the chat template marks no token of a conversation as the assistant's")
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ids[last:]:
        ids, target = [*ids[: last + 1], tokenizer.eos_token_id], [*target[: last + 1], True]
    return Encoded(ids, target)


def _by_prefixes(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, apply: Any
) -> tuple[list[int], list[bool]]:
    def written(count: int, asked: bool) -> list[int]:
        return list(apply(messages[:count], add_generation_prompt=asked)["input_ids"])

    ids = written(len(messages), asked=False)
    target = [False] * len(ids)
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = written(number, asked=True), written(number + 1, asked=False)
        if ids[: len(before)] != before or ids[: len(after)] != after:
            raise UserError(
                f"the chat template of {tokenizer.name_or_path!r} renders turn {number + 1} differently when more "
                "turns follow, so the assistant's tokens cannot be found; use a template with generation marks, or "
                "single-turn data"
            )
        written_by = ids[len(before) : len(after)]  # what a template puts behind the end of a turn is not the model's
        ends = [place for place, id in enumerate(written_by, 1) if id == tokenizer.eos_token_id]
        count = ends[-1] if ends else len(written_by)
        target[len(before) : len(before) + count] = [True] * count
    return ids, target
