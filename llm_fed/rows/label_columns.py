"""Which column of a file of labelled texts holds what: a text, perhaps a second one, and the label."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from llm_fed.basics.errors import UserError
from llm_fed.rows import columns
from llm_fed.settings.config import ColumnsConfig

ROLES = ("prompt", "input", "answer", "client", "split")  # text, second text, label, whose it is, in which split
PAIRS = (  # usual names of two texts that are judged together
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"),
    ("text_a", "text_b"), ("sentence_a", "sentence_b"), ("text", "text_pair"), ("question", "sentence"),
    ("query", "passage"), ("query", "document"), ("sentence", "sentence2"),
)  # fmt: skip
TEXTS = (
    "text", "sentence", "review", "content", "comment", "message", "tweet", "question", "query", "prompt", "title",
    "instruction", "input", "sentence1", "document", "body", "utterance",
)  # fmt: skip
LABELS = (
    "label", "labels", "gold_label", "class", "category", "intent", "sentiment", "target", "score", "rating", "stars",
    "similarity", "similarity_score", "grade", "answer", "output", "label_text",
)  # fmt: skip
_WORDS = {"prompt": "text", "input": "second text", "answer": "label"}


def resolve(
    wanted: ColumnsConfig,
    names: Sequence[str],
    sample: Sequence[Mapping[str, Any]],
    where: str,
    *,
    whose: bool,
    side: bool,
) -> dict[str, str]:
    """Role (of ROLES) -> column, of all `names` of columns; `wanted` names some. Arguments as of `columns.resolve`.

    Raises:
        UserError: a configured column is not there or would have no effect, or there is none for the text or the label.
    """
    given = {role: name for role, name in dataclasses.asdict(wanted).items() if name}
    if inert := [role for role in given if role not in ROLES]:
        raise UserError(
            f"{where}: task.columns.{inert[0]}={given[inert[0]]} would have no effect, since texts with labels are "
            "read here: task.columns.prompt names the text, input the second one of a pair, and answer the label; "
            "leave it out"
        )
    roles = {
        role: columns.configured(f"task.columns.{role}", name, names, sample, where) for role, name in given.items()
    }
    if not whose:
        roles.pop("client", None)
    for role in ("client", "split"):
        name = columns.usual(role, names, roles.values())
        if role not in roles and name and columns.fits(role, name, sample, whose, side):
            roles[role] = name
    if "answer" not in roles and (label := columns.pick(LABELS, _free(names, roles))):
        roles["answer"] = label
    free = _free(names, roles)
    if "prompt" not in roles:
        pairs = ((columns.pick((first,), free), columns.pick((second,), free)) for first, second in PAIRS)
        pair = next(((first, second) for first, second in pairs if first and second), None)
        if pair and "input" not in roles:
            roles["prompt"], roles["input"] = pair
        elif text := columns.pick(TEXTS, free):
            roles["prompt"] = text
    for role in ("prompt", "answer"):
        if role not in roles:
            raise UserError(
                f"{where}: no column for the {_WORDS[role]} among {columns.few(names)}; set task.columns.{role}=COLUMN"
            )
    return {role: roles[role] for role in ROLES if role in roles}


def _free(names: Sequence[str], roles: Mapping[str, str]) -> list[str]:
    return [name for name in names if name not in roles.values()]
