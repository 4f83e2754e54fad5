"""Conversations: rows of messages.

A row of `messages` (OpenAI, TRL), and one of `conversations` (ShareGPT); both may begin with a system message:

{"messages": [{"role": "user", "content": "Which ward?"}, {"role": "assistant", "content": "Surgery."}]}
{"conversations": [{"from": "human", "value": "Which ward?"}, {"from": "gpt", "value": "Surgery."}]}

A message of the assistant with `"weight": 0` or `"train": false` is not learned from. `tool_calls` and messages of the
role `tool` are given to the chat template, and `reasoning_content` stands before the answer, in <think> tags.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import TypeAlias

from llm_fed.basics.errors import UserError, one_line
from llm_fed.rows import Cell
from llm_fed.tasks.common import Turn
from llm_fed.tasks.control import THINK, THOUGHT, reasoning

Message: TypeAlias = dict[str, Cell]
ROLES = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "tool": "tool", "observation": "tool",
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning", "thinking")  # a field of any of these names is a reply's reasoning
# Which messages may follow which; the first one is the user's, after an optional system message.
_NEXT = {"": ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}


def turns_of(value: Cell, where: str, column: str) -> tuple[Turn, ...]:
    """The messages in one column of a row, up to the last of the assistant that is trained. UserError where they are
    none, not in the order system (perhaps), user, assistant, user, ..., assistant, with messages of tools behind one of
    the assistant, or none of the assistant is trained."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: column {column!r} holds no list of messages; a message is {{role, content}}")
    turns = [
        _turn(message, f"{where}: message {number} in column {column!r}") for number, message in enumerate(value, 1)
    ]
    spoken = turns[1:] if turns[0].role == "system" else turns
    for before, role in pairwise(["", *(turn.role for turn in spoken)]):
        if role not in _NEXT[before]:
            raise UserError(
                f"{where}: column {column!r} has a message of the {role} where one of the {_NEXT[before][0]} belongs; "
                "user and assistant must alternate, after an optional system message"
            )
    if not spoken or spoken[-1].role != "assistant":
        raise UserError(f"{where}: column {column!r} does not end with a message of the assistant, to be learned from")
    trained = [number for number, turn in enumerate(turns, 1) if turn.role == "assistant" and turn.trained]
    if not trained:
        raise UserError(
            f"{where}: column {column!r} has no message of the assistant to be learned from; all say weight=0 or "
            "train=false"
        )
    return tuple(turns[: trained[-1]])


def _turn(message: Cell, where: str) -> Turn:
    known = message if isinstance(message, dict) else {}
    role, content = known.get("role", known.get("from")), _joined(known.get("content", known.get("value")))
    role = role.strip().casefold() if isinstance(role, str) else str(role)
    turn = ROLES.get(role)
    fields = _fields(known, where) if turn in ("assistant", "tool") else {}
    if content is None and "tool_calls" in fields:
        content = ""
    if turn is None or not isinstance(content, str) or not (content.strip() or "tool_calls" in fields):
        raise UserError(f"{where} is {one_line(repr(message))[:80]}; it needs a role ({', '.join(ROLES)}) and a text")
    reasons = next((text for name in _REASONING if isinstance(text := known.get(name), str) and text.strip()), None)
    if turn == "assistant" and reasons and not reasoning(content):
        content = f"{THINK}\n{reasons}\n{THOUGHT}\n\n{content}"
    try:
        text = json.dumps(fields, allow_nan=False, default=str) if fields else ""
    except ValueError as error:  # a template would write it as a word
        raise UserError(
            f"{where} holds a number that JSON has not, such as NaN; correct it, or drop the row"
        ) from error
    return Turn(turn, content, _trained(known, turn, where), text)


def _joined(content: Cell) -> Cell:
    """The text of a content in parts, `[{"type": "text", "text": ...}]`; anything else as it is."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    if not texts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return content
    return "".join(map(str, texts))


def _trained(message: Message, role: str, where: str) -> bool:
    """What `weight` (OpenAI) and `train` (axolotl) say of a message; of the user none is trained."""
    trained = True
    for name in ("weight", "train"):
        value = message.get(name)
        if value is None:
            continue
        if value not in (0, 1) or isinstance(value, str):
            raise UserError(f"{where} has {name}={value!r}; it may be 0 (not learned from) or 1")
        if name == "train" and value and role != "assistant":
            raise UserError(f"{where} is of the {role} and has train=true; only the assistant's can be learned from")
        trained = trained and bool(value)
    return trained


def _fields(message: Message, where: str) -> dict[str, Cell]:
    """What a chat template reads of tools: an assistant's calls, and whose answer a tool's message is."""
    if message.get("role", message.get("from")) in ("tool", "observation"):
        return {name: message[name] for name in ("name", "tool_call_id") if message.get(name) is not None}
    calls = message.get("tool_calls") or [{"function": call} for call in [message.get("function_call")] if call]
    each = calls if isinstance(calls, list) else [calls]
    return {"tool_calls": [_call(call, where) for call in each]} if each else {}


def _call(call: Cell, where: str) -> Message:
    """A call with its arguments as an object, as chat templates expect it; OpenAI writes them as a text."""
    known = call if isinstance(call, dict) else {}
    function = known.get("function", known)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f"{where} calls the tool {one_line(repr(call))[:80]}; a call is {{function: {{name, arguments}}}}"
        )
    function = dict(function)
    if isinstance(arguments := function.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            function["arguments"] = json.loads(arguments)
    more: Message = {"id": known["id"]} if known.get("id") is not None else {}
    return {"type": "function", "function": function, **more}
