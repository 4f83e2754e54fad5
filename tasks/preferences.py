"""Rows of preferences, in TRL's forms: a chosen and a rejected answer to a prompt, as texts or as messages; the prompt
may stand in both answers, as the part with which they begin.

{"prompt": "Which ward?", "chosen": "Burns.", "rejected": "No idea."}
{"prompt": [{"role": "user", ...}], "chosen": [{"role": "assistant", ...}], "rejected": [{"role": "assistant", ...}]}
{"chosen": "\\n\\nHuman: Which ward?\\n\\nAssistant: Burns.", "rejected": "\\n\\nHuman: Which ..."}
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from os.path import commonprefix

from llm_fed.basics.errors import UserError, one_line
from llm_fed.rows import Cell
from llm_fed.rows.cells import as_seen
from llm_fed.rows.columns import NO, YES
from llm_fed.tasks.common import Example, Turn, text_of
from llm_fed.tasks.conversations import Message

_SPEAKERS = re.compile(r"(?:^|\n\n)(Human|Assistant):")  # of Anthropic's data
_ROLES = {"Human": "user", "Assistant": "assistant"}


def of_texts(requested: str, chosen: str, rejected: str, earlier: Sequence[Turn], where: str, group: str) -> Example:
    """Two answers to a prompt, perhaps after earlier turns; UserError where they are the same."""
    _check(chosen, rejected, where)
    if not earlier:
        return Example(requested, (chosen,), (), group, rejected=(Turn("user", requested), Turn("assistant", rejected)))
    before = (*(turn._replace(trained=False) for turn in earlier), Turn("user", requested))
    return Example(before, (chosen,), (), group, rejected=(*before, Turn("assistant", rejected)))


def of_conversations(chosen: Sequence[Turn], rejected: Sequence[Turn], where: str, group: str) -> Example:
    """Two conversations that begin alike; only the answers behind the common turns are compared. UserError where they
    are the same, one is the beginning of the other, or what differs first is no answer."""
    pairs = zip(chosen, rejected, strict=False)
    shared = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    behind = chosen[shared:], rejected[shared:]
    for name, turns, other in (("chosen", *behind), ("rejected", *behind[::-1])):
        if other and not any(turn.role == "assistant" for turn in turns):
            raise UserError(f"{where}: the {name} answer is empty behind what both share; fill it, or drop the row")
    if all(behind) and (apart := [turns[0] for turns in behind if turns[0].role != "assistant"]):
        raise UserError(
            f"{where}: the chosen and the rejected answer are behind different prompts; only one has the "
            f"{apart[0].role}'s text {one_line(apart[0].content.strip())[:60]!r}; give both the same, or drop the row"
        )
    if not any(behind):
        raise _same(chosen[-1].content, where)
    if len(behind[0]) == len(behind[1]) == 1 and not (behind[0][0].fields or behind[1][0].fields):
        _check(behind[0][0].content, behind[1][0].content, where)
    one, other = (
        tuple(turn._replace(trained=turn.trained and index >= shared) for index, turn in enumerate(turns))
        for turns in (chosen, rejected)
    )
    return Example(one[:-1], (one[-1].content,), (), group, one[-1].fields, rejected=other)


def check_prompt(requested: Sequence[Message], whole: Sequence[Message], where: str, column: str) -> None:
    """UserError where whole conversations stand beside a prompt that is not theirs: neither the messages with which
    they begin nor a text that has one of the user's in it."""
    said, turns = ([str(one.get("content", one.get("value"))).strip() for one in all] for all in (requested, whole))
    if said == turns[: len(said)]:
        return
    speakers = [str(message.get("role", message.get("from"))).strip().casefold() for message in whole]
    held = [text for who, text in zip(speakers, turns, strict=True) if who in ("user", "human")]
    if len(said) > 1 or not any(text and text in said[0] for text in held):
        raise UserError(
            f"{where}: the prompt, {one_line(said[-1])[-60:]!r}, is not what the messages in column {column!r} begin "
            "with; correct one of both, or drop the row"
        )


def messages_of(text: str) -> list[Message] | None:
    """The messages of a text in Anthropic's form (Human: ... Assistant: ...); None of any other."""
    parts = _SPEAKERS.split(text)
    if len(parts) < 5 or parts[0].strip():
        return None
    return [{"role": _ROLES[who], "content": said.strip()} for who, said in zip(parts[1::2], parts[2::2], strict=True)]


def apart(chosen: str, rejected: str, where: str) -> tuple[str, str, str]:
    """(prompt, chosen, rejected) of two texts that begin with the prompt: with the words that they share. UserError:
    they share none, or there is no answer behind them."""
    shared = commonprefix([chosen, rejected])
    if len(shared) < min(len(chosen), len(rejected)):
        shared = shared[: len(shared) - len(re.split(r"\s", shared)[-1])]  # up to the last white space
    if not shared.strip():
        raise UserError(
            f"{where}: the chosen and the rejected text share no beginning that could be their prompt; name its column "
            "in task.columns.prompt"
        )
    answers = chosen[len(shared) :].strip(), rejected[len(shared) :].strip()
    if not any(answers):
        raise _same(chosen, where)
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not answer:
            raise UserError(f"{where}: the {name} answer is empty behind what both share; fill it, or drop the row")
    return shared.strip(), *answers


def desirable(value: Cell, where: str, column: str) -> bool:
    """What a label says of an answer; UserError where it is no yes or no."""
    said = str(value).strip().casefold()
    if said not in (*YES, *NO):
        raise UserError(
            f"{where}: column {column!r} holds {one_line(repr(value))[:40]}; of an answer it takes true (desirable) or "
            "false; correct it, or drop the row"
        )
    return said in YES


def _check(chosen: str, rejected: str, where: str) -> None:
    if as_seen(chosen) == as_seen(rejected):
        raise _same(chosen, where)


def _same(text: str, where: str) -> UserError:
    return UserError(
        f"{where}: the chosen and the rejected answer are the same, {one_line(text.strip())[-60:]!r}, so that nothing "
        "is preferred; correct one, or drop the row"
    )


def check(name: str, examples: Sequence[Example]) -> None:
    """UserError unless all examples of a split are of the form that the loss `name`, which is not sft, learns from."""
    judged = name == "kto"
    for example in examples:
        if (example.desirable is None) if judged else not example.rejected:
            lacks, columns = ("label that says true or false", "prompt, completion and label") if judged else (
                "rejected answer", "prompt, chosen and rejected"
            )  # fmt: skip
            answers = f"that ends with {one_line(text_of(example.prompt))[-60:]!r}"
            where = f"{example.where}: " if example.where else ""
            raise UserError(
                f"{where}objective.name={name} learns from rows with {columns}, but the prompt "
                f"{answers} has no {lacks}; add it, name its column in task.columns, or set objective.name="
                f"{'dpo' if judged and example.rejected else 'kto' if example.desirable is not None else 'sft'}"
            )


def rejected(example: Example) -> Example:
    """An example as it would be with the rejected answer."""
    *before, last = example.rejected
    prompt = example.prompt if isinstance(example.prompt, str) else tuple(before)
    return replace(example, prompt=prompt, answers=(last.content,), fields=last.fields)
