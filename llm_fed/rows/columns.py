"""Which column of a file holds what: the one that `task.columns` names, else the first with a usual name; of texts with
labels a text, perhaps a second one, and the label."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from llm_fed.basics.errors import UserError, did_you_mean, listed
from llm_fed.basics.names import composed
from llm_fed.rows import Cell
from llm_fed.rows.layout import split_of
from llm_fed.settings.config import ColumnsConfig

USUAL_NAMES = {
    "prompt": ("instruction", "prompt", "question", "input", "inputs", "question_stem", "ctx"),
    "input": ("input", "context"),
    "answer": (
        "output", "response", "answer", "completion", "target", "targets", "generated", "answers", "answerkey",
    ),
    "options": ("options", "choices", "endings"),
    "system": ("system", "system_prompt", "system_message"),
    "history": ("history",),
    "messages": ("messages", "conversations", "conversation"),
    "text": ("text",),
    "chosen": ("chosen", "chosen_response", "response_chosen", "preferred"),
    "rejected": ("rejected", "rejected_response", "response_rejected", "dispreferred"),
    "label": ("label", "kto_tag"),
    "client": ("client", "client_id"),
    "split": ("split",),
}  # fmt: skip
REQUIRED = ("prompt", "answer")
# What these are called where no column has a usual name.
LESS_USUAL = {
    "prompt": ("query", "text", "source", "user", "human", "sentence", "title", "问题", "指令", "提示", "输入"),
    "answer": ("reply", "summary", "assistant", "target_text", "gold", "translation", "回答", "答案", "输出"),
}
_LETTERS = {"prompt": "q", "answer": "a"}  # beside each other, and where no column b is an option, too
LABELS = ("label", "labels")  # of a text
_COMPARED = ("chosen", "rejected")
Values: TypeAlias = Mapping[str, Cell]  # of a row
# Forms of a row, and which roles it has.
FORMS = {
    "pairs": ("prompt", "input", "answer", "options", "system", "history", "label"),
    "preferences": ("chosen", "rejected", "prompt", "input", "system", "history"),
    "conversation": ("messages", "system", "label"),
    "text": ("text",),
}
_OF_ALL = ("client", "split")
_BOOKKEEPING = re.compile(
    r"|_?id|idx|index|uid|uuid|guid|row|(?:row|example|question|prompt|sample)_?(?:id|idx|index)|qid|no"
    r"|unnamed: \d+(?:\.\d+)*|__index_level_\d+__|level_\d+"
)
# What a label says of an answer.
YES, NO = ("true", "1", "1.0", "yes", "desirable"), ("false", "0", "0.0", "-1", "no", "undesirable")
LABELLED = ("prompt", "input", "answer", "client", "split")  # text, second text, label, whose it is, in which split
PAIRS = (  # usual names of two texts that are judged together
    ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("text1", "text2"),
    ("text_a", "text_b"), ("sentence_a", "sentence_b"), ("text", "text_pair"), ("question", "sentence"),
    ("query", "passage"), ("query", "document"), ("sentence", "sentence2"),
)  # fmt: skip
TEXTS = (
    "text", "sentence", "review", "content", "comment", "message", "tweet", "question", "query", "prompt", "title",
    "instruction", "input", "sentence1", "document", "body", "utterance",
)  # fmt: skip
OF_LABELS = (
    "label", "labels", "gold_label", "class", "category", "intent", "sentiment", "target", "score", "rating", "stars",
    "similarity", "similarity_score", "grade", "answer", "output", "label_text",
)  # fmt: skip


class SeenColumns(NamedTuple):
    """The columns of a file, of which each may have a role. Where a name alone does not say what a column holds, the
    sample of rows does."""

    names: Sequence[str]
    sample: Sequence[Values]
    where: str
    whose: bool  # whether one may name the client
    side: bool  # whether one may name the split


def resolve(columns: ColumnsConfig, seen: SeenColumns) -> dict[str, str]:
    """Role (a key of USUAL_NAMES) -> column. UserError where a configured column is not there or would have no effect,
    or where there is none for the prompt or the answer."""
    names, sample, where, *_ = seen
    for extra in columns.extra:
        configured("task.columns.extra", extra, names, sample, where)
    roles = _configured_roles(columns, seen)
    given = dict(roles)
    form = next((form for form in ("preferences", "conversation", "text") if FORMS[form][0] in given), None)
    form = form or form_of(roles, names, sample)
    if inert := [role for role in given if role not in (*FORMS[form], *_OF_ALL)]:
        read = "prompts and answers are" if form in ("pairs", "preferences") else f"the column for {FORMS[form][0]} is"
        raise UserError(
            f"{where}: task.columns.{inert[0]}={given[inert[0]]} would have no effect, since {read} read here; leave "
            f"it out, or set the column for {inert[0] if form == 'pairs' else 'prompt and answer'} alone"
        )
    _add_usual(roles, [*FORMS[form], *_OF_ALL], seen)
    if "label" in roles and "label" not in given and not _judges(roles, sample):
        del roles["label"]
    talk = usual("messages", names, roles.values())
    if form == "preferences" and "prompt" not in roles and talk and sample:
        chosen = [row.get(roles["chosen"]) for row in sample]
        if all(isinstance(each, dict | None) for each in chosen):
            roles["prompt"] = talk  # each answer is one message, and the others stand in a column of their own
    if form == "preferences" and "rejected" not in roles:
        raise _lacking("rejected", "rejected answer", names, where)
    if form == "pairs" and "answer" not in roles and "options" in roles and (label := pick(("label",), names)):
        roles["answer"] = label
    for role in REQUIRED if form == "pairs" else ():
        if role not in roles and (name := less_usual(role, names, roles.values())):
            roles[role] = name
        if role not in roles:
            raise _lacking(role, role, names, where, _instead(names))
    return {role: roles[role] for role in [*FORMS[form], *_OF_ALL] if role in roles}


def _configured_roles(wanted: ColumnsConfig, seen: SeenColumns) -> dict[str, str]:
    """By role the columns that the configuration names, as they are called in the file."""
    given = {role: name for role, name in dataclasses.asdict(wanted).items() if isinstance(name, str)}
    roles = {role: configured(f"task.columns.{role}", name, *seen[:3]) for role, name in given.items()}
    return roles if seen.whose else {role: name for role, name in roles.items() if role != "client"}


def _add_usual(roles: dict[str, str], wanted: Iterable[str], seen: SeenColumns) -> None:
    """Add the columns with usual names for these roles."""
    for role in wanted:
        name = usual(role, seen.names, roles.values())
        if role not in roles and name and fits(role, name, seen):
            roles[role] = name


def _lacking(role: str, what: str, names: Sequence[str], where: str, more: str = "") -> UserError:
    return UserError(f"{where}: no column for the {what} among {listed(names)}; set task.columns.{role}=COLUMN{more}")


def _instead(names: Sequence[str]) -> str:
    """For an error: how rows would be read that have a chosen answer alone, or labels; empty of other rows."""
    if (chosen := usual("chosen", names, ())) and not usual("rejected", names, ()):
        return f"; if {chosen} is preferred to an answer in another column, set task.columns.rejected=COLUMN"
    text, label = usual("text", names, ()), pick(LABELS, names)
    return f"; to learn the {label} of each {text}, set task.name=classification" if text and label else ""


def form_of(known: Mapping[str, str], names: Sequence[str], sample: Sequence[Values]) -> str:
    """Which form the rows have (a key of FORMS), by the names of their columns and by those that are known already."""
    prompt, answer, chosen, rejected = (known.get(role) or usual(role, names, ()) for role in (*REQUIRED, *_COMPARED))
    compared = bool(chosen and rejected)
    beside = compared and "answer" not in known and _filled(chosen, sample) >= _filled(answer, sample)
    if prompt and answer and prompt != answer and not beside:
        return "pairs"
    if compared:
        return "preferences"
    if (name := usual("messages", names, ())) and _may_be_talk([row.get(name) for row in sample]):
        return "conversation"
    is_text = not (prompt or answer or pick((*LABELS, *LESS_USUAL["answer"]), names)) and usual("text", names, ())
    return "text" if is_text else "pairs"


def _judges(roles: Mapping[str, str], sample: Sequence[Values]) -> bool:
    """Whether a label says that answers are desirable or not: of TRL's completions, or true and false of messages. Of
    other rows it may say anything."""
    label, answer = _form_of(roles["label"]), _form_of(roles.get("answer", ""))
    plain = "messages" in roles and 2 * _num_plain([row.get(roles["label"]) for row in sample]) > len(sample)
    return plain or label == "kto_tag" or answer == "completion"


def _num_plain(values: Iterable[Cell]) -> int:
    """How many are true or false."""
    return sum(str(value).strip().casefold() in (YES[0], NO[0]) for value in values)


def _filled(name: str | None, sample: Sequence[Values]) -> int:
    """In how many rows a column holds something: an answer beside a chosen one, if in all of them, is the same."""
    return sum(row.get(name) is not None for row in sample) if name else 0


def usual(role: str, names: Sequence[str], taken: Iterable[str]) -> str | None:
    return pick(USUAL_NAMES[role], [name for name in names if name not in taken])


def less_usual(role: str, names: Sequence[str], taken: Iterable[str]) -> str | None:
    """The column that holds the prompt or the answer where none has a usual name."""
    letters = {_form_of(name) for name in names}
    wanted = LESS_USUAL[role] + ((_LETTERS[role],) if {*_LETTERS.values()} <= letters and "b" not in letters else ())
    return pick(wanted, [name for name in names if name not in taken])


def pick(wanted: Iterable[str], names: Sequence[str]) -> str | None:
    """The column with the first of the wanted names that there is; an exact name wins over one in other letters."""
    forms = {_form_of(name): name for name in reversed(names)}  # of names of one form the first
    return next((name if name in names else forms[name] for name in wanted if name in names or name in forms), None)


def _form_of(name: str) -> str:
    return composed(name).strip().casefold()


def fits(role: str, name: str, seen: SeenColumns) -> bool:
    if role == "client":
        return seen.whose
    values = [value for row in seen.sample if (value := row.get(name)) is not None]
    if role == "split":
        return (
            seen.side and bool(values) and all(isinstance(value, str) and split_of(value.strip()) for value in values)
        )
    if role == "label":
        judged = all(str(value).strip().casefold() in (*YES, *NO) for value in values)
        return bool(values) and (judged or 2 * _num_plain(values) > len(values))
    return role != "messages" or _may_be_talk(values)


def _may_be_talk(values: Iterable[Cell]) -> bool:
    held = [value for value in values if value is not None]
    return not held or any(isinstance(value, list) or str(value).lstrip().startswith("[") for value in held)


def configured(key: str, name: str, names: Sequence[str], sample: Sequence[Values], where: str) -> str:
    """The column that the configuration names, also in other letters, or within another one (`ticket.question`)."""
    if name in names:
        return name
    alike = [each for each in names if _form_of(each) == _form_of(name)]
    if len(alike) == 1:
        return alike[0]
    if "." not in name or name.partition(".")[0] not in names:
        inner = ((name, value) for row in sample[:10] for name, value in row.items() if isinstance(value, dict))
        paths = dict.fromkeys(f"{name}.{key}" for name, value in inner for key in value)
        check_column(key, name, [*names, *paths], where)
    return name


def check_column(key: str, name: str, names: Iterable[str], where: str) -> None:
    """UserError unless the column that the configuration names under `key` exists."""
    names = list(names)
    if name not in names:
        raise UserError(f"{where}: {key}={name!r} is not a column{did_you_mean(name, names)}; known: {listed(names)}")


def unused(names: Iterable[str], roles: Iterable[str]) -> list[str]:
    """The columns that no role uses and that are not plainly numbers of rows."""
    used = {*roles, *(name.partition(".")[0] for name in roles)}
    return [name for name in names if name not in used and not _BOOKKEEPING.fullmatch(name.strip().casefold())]


def resolve_labelled(wanted: ColumnsConfig, seen: SeenColumns) -> dict[str, str]:
    """Role (of LABELLED) -> column; `wanted` names some. UserError: a configured column is not there or would have no
    effect, or there is none for the text or the label."""
    names, where = seen.names, seen.where
    roles = _configured_roles(wanted, seen)
    if inert := [role for role in roles if role not in LABELLED]:
        raise UserError(
            f"{where}: task.columns.{inert[0]}={roles[inert[0]]} would have no effect, since texts with labels are "
            "read here: task.columns.prompt names the text, input the second one of a pair, and answer the label; "
            "leave it out"
        )
    _add_usual(roles, _OF_ALL, seen)
    free = [name for name in names if name not in roles.values()]
    if "answer" not in roles and (label := pick(OF_LABELS, free)):
        roles["answer"] = label
        free.remove(label)
    if "prompt" not in roles:
        pairs = ((pick((first,), free), pick((second,), free)) for first, second in PAIRS)
        pair = next(((first, second) for first, second in pairs if first and second), None)
        if pair and "input" not in roles:
            roles["prompt"], roles["input"] = pair
        elif text := pick(TEXTS, free):
            roles["prompt"] = text
    for role, what in (("prompt", "text"), ("answer", "label")):
        if role not in roles:
            raise _lacking(role, what, names, where)
    return {role: roles[role] for role in LABELLED if role in roles}
