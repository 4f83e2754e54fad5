"""Options that a prompt lists as text, such as `OPTIONS:\\n- yes\\n- no` or `(A) yes (B) no`, and the form in which
answers name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

_HEAD = re.compile(r"(?i)\b(?:options|choices)[ \t]*:[ \t]*(?P<line>[^\n]*)(?P<bullets>(?:\n[ \t]*[-*•] [^\n]*)*)")
_BULLET = re.compile(r"\n[ \t]*[-*•] ")
_SEPARATORS = ("|", ";", ",", "/", " or ")
_MARK = re.compile(r"\((?P<inner>[A-Za-z]|\d{1,2})\)[ \t]+|(?m:^[ \t]*)(?P<outer>[A-Z]|\d{1,2})[).:][ \t]+")


class Option(NamedTuple):
    """One option of a prompt."""

    text: str
    letter: str = ""  # or number; empty where there is none
    mark: str = ""  # as it stands before the text: `(A)`, `A.`


# How an answer may name an option.
FORMS = {
    "text": lambda option: option.text,
    "letter": lambda option: option.letter,
    "mark": lambda option: option.mark,
    "whole": lambda option: f"{option.mark} {option.text}",
}


@lru_cache(4096)  # a prompt is asked for by several rules
def listed(prompt: str) -> tuple[Option, ...]:
    """The options in a prompt, the last list of them; () where there are fewer than two. Read are lines `- ...`, or
    words on one line, after `OPTIONS:` or `Choices:`, and marks that follow each other from A, a or 1: `(A) ... (B)
    ...` anywhere, `A. ...` or `1) ...` at the beginnings of lines."""
    for head in reversed(list(_HEAD.finditer(prompt))):
        texts = _BULLET.split(head["bullets"])[1:] or _on_one_line(head["line"])
        if len(texts) > 1:
            return tuple(Option(text.strip()) for text in texts)
    return max(_marked(prompt), key=len, default=())


def form_of(prompts: Iterable[str], answers: Iterable[str]) -> str:
    """The key of FORMS in which most answers name an option of their prompt."""
    hits = dict.fromkeys(FORMS, 0)
    for prompt, answer in zip(prompts, answers, strict=True):
        options = listed(prompt)
        for form, write in FORMS.items():
            hits[form] += answer.strip() in map(write, options)
    return max(hits, key=lambda form: hits[form])


def _on_one_line(line: str) -> list[str]:
    for separator in _SEPARATORS:
        if separator in line:
            parts = (part.strip().removeprefix("or ").strip(" .'\"") for part in line.split(separator))
            return [part for part in parts if part]
    return []


def _marked(prompt: str) -> Iterator[tuple[Option, ...]]:
    """Every run of marks that begins at the first letter or number and has at least two, the last one first."""
    marks = list(_MARK.finditer(prompt))
    for start in reversed([place for place, mark in enumerate(marks) if _letter(mark) in ("A", "a", "1")]):
        run = [marks[start]]
        for mark in marks[start + 1 :]:
            if not _follows(_letter(run[-1]), _letter(mark)):
                break
            run.append(mark)
        if len(run) > 1:
            ends = [mark.start() for mark in run[1:]] + [len(prompt)]
            yield tuple(
                Option(prompt[mark.end() : end].partition("\n")[0].strip(" \t,;"), _letter(mark), mark[0].strip())
                for mark, end in zip(run, ends, strict=True)
            )


def _letter(mark: re.Match[str]) -> str:
    return mark["inner"] or mark["outer"]


def _follows(before: str, after: str) -> bool:
    if before.isdigit() or after.isdigit():
        return before.isdigit() and after.isdigit() and int(after) == int(before) + 1
    return ord(after) == ord(before) + 1


def texts(options: Sequence[Option], form: str) -> tuple[str, ...]:
    return tuple(map(FORMS[form], options))
