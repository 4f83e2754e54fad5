"""The best rule that trains nothing, for each client: a score means little until it is above this one.

A rule answers without a model. Which one is best is decided on a client's training examples by the run's own metric:
what it learns of one half of them is scored on the other. The best one is scored on the test examples. The rules, in
the order in which ties are broken:

    most frequent answer            of the training examples; among given options the one that was right most often
    first option                    of those that an example has, or that its prompt lists (`listed`)
    most frequent position          the option that stands where the right one stood most often
    all options                     one after another
    copy of the prompt              of a conversation the last text of the user
    last paragraph of the prompt    often the text that an instruction is about, such as alpaca's `input`
    most frequent class             where there are labels, the only rule
    one class for all               in its place, where the metric scores it higher
    mean of the numbers             where numbers are predicted; its correlation is not defined
    longer or shorter answer        of pairs of answers, the only rules

Where an answer has to name exactly one option (`Metric.one_option`) only the first three apply. Everything is
deterministic: equal counts go to what comes first in a fixed order of the training examples.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np

from llm_fed.scoring.evaluation import by_length
from llm_fed.scoring.scores import CLASSIFIED, find, score, score_each
from llm_fed.tasks.common import Example

NAMES = (
    "most frequent answer", "first option", "most frequent position", "all options", "copy of the prompt",
    "last paragraph of the prompt", "most frequent class", "one class for all", "mean of the numbers",
    "longer answer", "shorter answer",
)  # fmt: skip
FEW = 12  # clients whose rules are named one by one
MOST = 50  # training examples of a client on which its rules are scored

Rule = Callable[[Example], str]  # the answer to an example
_HEAD = re.compile(r"(?i)\b(?:options|choices)[ \t]*:[ \t]*(?P<line>[^\n]*)(?P<bullets>(?:\n[ \t]*[-*•] [^\n]*)*)")
_BULLET = re.compile(r"\n[ \t]*[-*•] ")
_SEPARATORS = ("|", ";", ",", "/", " or ")
_MARK = re.compile(r"\((?P<inner>[A-Za-z]|\d{1,2})\)[ \t]+|(?m:^[ \t]*)(?P<outer>[A-Z]|\d{1,2})[).:][ \t]+")


@dataclass(frozen=True)
class BestRule:
    """A client's best rule, and its score on the test examples, 0-100."""

    name: str
    score: float
    examples: tuple[float, ...] = ()  # the score of each of them


def best_rule(train: Sequence[Any], test: Sequence[Any], metric: str) -> BestRule | None:
    """The rule that is best on the training Examples, or what else has labels, scored on the test examples; None
    where there are none."""
    read = find(metric, labelled=bool(train) and hasattr(train[0], "label")).scores
    if not train or not test or read == "loss":  # of which a rule has none
        return None
    if read == "preferences":
        by_rule = by_length(train, test)
        return BestRule(*by_rule) if by_rule else None
    if read in CLASSIFIED:
        name, constant = _constant([each.label for each in train], metric, read)
        said, labels = [constant] * len(test), [each.label for each in test]
        return BestRule(name, score(metric, said, labels), tuple(score_each(metric, said, labels)))
    order = np.random.default_rng(len(train)).permutation(len(train))  # files are often sorted by their answers
    train = [train[index] for index in order.tolist()]
    first, second = train[::2], train[1::2] or train
    by_name = dict.fromkeys(NAMES, 0.0)
    for fitted, others in ((first, second), (second, first)):
        seen = others[: MOST // 2]
        for name, value in _scores(rules_of(fitted, metric), seen, metric).items():
            by_name[name] += value * len(seen)
    rules = rules_of(train, metric)
    best = max(rules, key=lambda name: by_name[name])  # of equal ones the first
    answered, answers = [rules[best](example) for example in test], [example.answers for example in test]
    return BestRule(best, score(metric, answered, answers), tuple(score_each(metric, answered, answers)))


def _constant(labels: Sequence[float], metric: str, read: str) -> tuple[str, float]:
    """The rule that says the same of all examples, and what it says."""
    if read == "values":
        return "mean of the numbers", fmean(labels)
    by_frequency = [label for label, _ in Counter(labels).most_common()]
    scored = {label: score(metric, [label] * len(labels), labels) for label in by_frequency}
    best = max(by_frequency, key=lambda label: scored[label])  # of equal ones the most frequent
    return "most frequent class" if best == by_frequency[0] else "one class for all", best


def _scores(rules: Mapping[str, Rule], examples: Sequence[Example], metric: str) -> dict[str, float]:
    said = {name: tuple(map(rule, examples)) for name, rule in rules.items()}
    right = [example.answers for example in examples]
    known = {own: score(metric, own, right) for own in dict.fromkeys(said.values())}  # as rules often agree on all
    # NaN speaks for no rule.
    return {name: 0.0 if math.isnan(known[own]) else known[own] for name, own in said.items()}


def rules_of(train: Sequence[Example], metric: str) -> dict[str, Rule]:
    """The rules for text that apply to a client's examples, by name, in the order in which ties are broken."""
    answers = Counter(example.answers[0] for example in train)
    frequent = answers.most_common(1)[0][0]  # of equal counts the first that came
    rules: dict[str, Rule] = {"most frequent answer": lambda example: frequent}
    if find(metric).one_option:
        rules |= _of_options(lambda example: example.options, train)
        return {name: rule for name, rule in rules.items() if name != "all options"}
    return {
        **_of_options(lambda example: example.options or listed(question(example)), train[:MOST]),
        **rules,
        "copy of the prompt": question,
        "last paragraph of the prompt": lambda example: re.split(r"\n\s*\n", question(example).strip())[-1],
    }


def question(example: Example) -> str:
    """The prompt; of a conversation the last text of the user."""
    if isinstance(example.prompt, str):
        return example.prompt
    return next((turn.content for turn in reversed(example.prompt) if turn.role == "user"), "")


def _of_options(of: Callable[[Example], Sequence[str]], train: Sequence[Example]) -> dict[str, Rule]:
    """Rules that choose among an example's options, which `of` finds; the answer is empty where it has none. No rules
    where no training example has options."""
    given = [(of(example), example.answers) for example in train]
    if not any(options for options, _ in given):
        return {}
    right = [(index, text) for options, answers in given for index, text in enumerate(options) if text in answers]
    indices, rights = Counter(index for index, _ in right), Counter(text for _, text in right)

    return {
        "most frequent answer": lambda example: max(of(example), key=lambda text: rights[text], default=""),
        "first option": lambda example: next(iter(of(example)), ""),
        "most frequent position": lambda example: max(
            enumerate(of(example)), key=lambda each: indices[each[0]], default=(0, "")
        )[1],
        "all options": lambda example: " ".join(of(example)),
    }


def describe(line: Mapping[str, Any]) -> str:
    """Which rules a line of kind `rule` has: of few clients whose each is, of more how many have it."""
    by_rule: dict[str, list[str]] = {}
    rules = line["rules"]
    for client, name in rules.items():
        by_rule.setdefault(name, []).append(client)
    if len(rules) == 1:
        return next(iter(by_rule))
    parts = [
        f"{name} ({', '.join(clients) if len(rules) <= FEW else f'{len(clients)} of the clients'})"
        for name, clients in sorted(by_rule.items(), key=lambda item: -len(item[1]))
    ]
    return "; ".join(parts)


@lru_cache(4096)  # a prompt is requested by several rules
def listed(prompt: str) -> tuple[str, ...]:
    """The options in a prompt, the last list of them; () where there are fewer than two. Read are lines `- ...`, or
    words on one line, after `OPTIONS:` or `Choices:`, and marks that follow each other from A, a or 1: `(A) ... (B)
    ...` anywhere, `A. ...` or `1) ...` at the beginnings of lines."""
    for head in reversed(list(_HEAD.finditer(prompt))):
        texts = _BULLET.split(head["bullets"])[1:] or _on_one_line(head["line"])
        if len(texts) > 1:
            return tuple(text.strip() for text in texts)
    return max(_marked(prompt), key=len, default=())


def _on_one_line(line: str) -> list[str]:
    for separator in _SEPARATORS:
        if separator in line:
            parts = (part.strip().removeprefix("or ").strip(" .'\"") for part in line.split(separator))
            return [part for part in parts if part]
    return []


def _marked(prompt: str) -> Iterator[tuple[str, ...]]:
    """Every run of marks that begins at the first letter or number and has at least two, the last one first."""
    marks = list(_MARK.finditer(prompt))
    for start in reversed([index for index, mark in enumerate(marks) if _letter(mark) in ("A", "a", "1")]):
        run = [marks[start]]
        for mark in marks[start + 1 :]:
            before = _letter(run[-1])
            if _letter(mark) != (str(int(before) + 1) if before.isdigit() else chr(ord(before) + 1)):
                break
            run.append(mark)
        if len(run) > 1:
            ends = [mark.start() for mark in run[1:]] + [len(prompt)]
            yield tuple(
                prompt[mark.end() : end].partition("\n")[0].strip(" \t,;") for mark, end in zip(run, ends, strict=True)
            )


def _letter(mark: re.Match[str]) -> str:
    return mark["inner"] or mark["outer"]
