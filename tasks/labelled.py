"""The tasks `classification` and `regression`: your own texts, or pairs of texts, each with a label or with a number.

Files lie as those of the task `files` do. Rows of `shop-a.jsonl`, of pairs, and of numbers:

{"text": "It broke on the second day.", "label": "negative"}
{"sentence1": "A man sleeps.", "sentence2": "A man is awake.", "label": "contradiction"}
{"sentence1": "A dog runs.", "sentence2": "A dog is running.", "score": 4.8}

`task.labels` names the classes in the order of the logits; without it they are those of the data, in natural order. A
number in the data is then the index of a class, unless it is a class itself. `task.partition` divides by the label.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence

from llm_fed.basics.errors import UserError, did_you_mean, listed
from llm_fed.rows import Row, cells, columns
from llm_fed.rows.layout import natural_order
from llm_fed.settings.config import NUMBER, TaskConfig
from llm_fed.tasks.collected import WHOLE, Collected, Placed
from llm_fed.tasks.common import Example, TaskData
from llm_fed.tasks.examples import Scheme
from llm_fed.tasks.files import Collect, from_files

NAMES = ("classification", "regression")
KIND = "sequence-classification"  # of base that these tasks are for
CLASSIFICATION, REGRESSION = "accuracy", "pearson"  # the default metrics
SHOWN = 8  # labels in a message


class LabelScheme(Scheme):
    """Rows of a text, or two, and a label, by which a partition divides where no column is named."""

    def _resolve(self) -> None:
        self.roles = columns.resolve_labelled(self.wanted, self._seen_columns)

    def _example(self, row: Row, group: str) -> Example:
        roles = self.roles
        pair = cells.text_of(row, roles["input"]) if "input" in roles else ""
        given = cells.parsed(cells.held(row, roles["answer"]))  # a list is no class, also where it is written as text
        label = _plain(cells.as_text(given, row.where, roles["answer"]))
        if not label:
            raise UserError(f"{row.where}: column {roles['answer']!r} is empty; fill it, or drop the row")
        return Example(cells.text_of(row, roles["prompt"]), (label,), group=group if self.label else label, pair=pair)


class NumberScheme(LabelScheme):
    """Rows whose labels are numbers."""

    def _example(self, row: Row, group: str) -> Example:
        example = super()._example(row, group)
        (label,) = example.answers
        if number(label) is None:
            raise UserError(
                f"{row.where}: the label {label[:60]!r} is no number, which the task regression needs; correct it, "
                "drop the row, or set task.name=classification"
            )
        return example


def load(config: TaskConfig, seed: int, collect: Collect = from_files) -> TaskData:
    """The natural clients of the task `classification`, with the names of its labels."""
    collected = collect(config, LabelScheme)
    clients, reading = collected.clients(), collected.reading.checked()
    reading.labels = seen = _first(collected)
    labels = labels_of(config.labels, seen, len(collected.examples))
    if config.labels is None and config.partition.test is None:
        check_trained(collected.examples)
    return TaskData("classification", CLASSIFICATION, clients, labels, reading=reading, kind=KIND)


def load_numbers(config: TaskConfig, seed: int, collect: Collect = from_files) -> TaskData:
    """The natural clients of the task `regression`."""
    if config.labels is not None:
        raise UserError("task.labels names classes, but the task regression predicts a number; leave it out")
    collected = collect(config, NumberScheme)
    clients, reading, seen = collected.clients(), collected.reading.checked(), _first(collected)
    if len(seen) == 1:
        ((label, where),) = seen.items()
        raise UserError(f"{where}: every row has the number {label}: there is nothing to predict; correct the column")
    return TaskData("regression", REGRESSION, clients, (NUMBER,), reading=reading, kind=KIND)


def _first(collected: Collected) -> dict[str, str]:
    """By label, where it stands first."""
    found: dict[str, str] = {}
    for _, _, example in collected.examples:
        found.setdefault(example.answers[0], example.where)
    return found


def number(text: str) -> float | None:
    """The finite number that a text is, if it is one."""
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def labels_of(named: tuple[str, ...] | None, seen: Mapping[str, str], rows: int) -> tuple[str, ...]:
    """The classes, by logit. `named`: those of the configuration. `seen`: the labels of the data, with the place of the
    first row that has each. `rows`: how many there are. UserError: a label is none of those that are named, or, where
    none are, labels cannot be classes."""
    if named is not None:
        if len(named) < 2:
            raise UserError(f"task.labels={[*named]}: a classifier needs at least two labels")
        if again := sorted({label for label in named if [*named].count(label) > 1}):
            raise UserError(f"task.labels={[*named]}: {listed(again)} stands there more than once; leave it out once")
        _check_case({label: "task.labels" for label in named})
        for label, where in seen.items():
            if place_of(label, named) is None:
                known = f"[{listed([*named], SHOWN)}]{did_you_mean(label, named)}"
                raise UserError(
                    f"{where}: the label {label!r} is none of task.labels={known}; correct the row, or add the label "
                    "there"
                )
        return named
    for label, where in seen.items():
        if (value := number(label)) is not None and value != int(value):
            raise UserError(
                f"{where}: the label {label} is a number with a fraction, not a class; set task.name=regression to "
                "predict numbers, or name all classes in task.labels"
            )
    _check_case(seen)
    if len(seen) == 1:
        ((label, where),) = seen.items()
        raise UserError(
            f"{where}: every row has the label {label!r}, so there is nothing to tell apart; correct the column, or "
            "name all classes in task.labels"
        )
    if len(seen) == rows > SHOWN:
        label, where = next(iter(seen.items()))
        raise UserError(
            f"{where}: each of the {rows} rows has a label of its own, such as {label[:60]!r}; set "
            "task.columns.answer=COLUMN to the column of the labels, or task.name=files to learn answers"
        )
    return tuple(sorted(seen, key=natural_order))


def place_of(label: str, names: Sequence[str]) -> int | None:
    """The logit of a label among classes: of the name itself, also in other letters; of a number, where no class is
    one, the place. None: it is none of them."""
    if label in names:
        return names.index(label)
    alike = [index for index, name in enumerate(names) if _form(name) == _form(label)]
    if len(alike) == 1:
        return alike[0]
    by_place = label.isdecimal() and label.isascii() and not any(number(name) is not None for name in names)
    return int(label) if by_place and int(label[:9]) < len(names) else None


def check_trained(examples: Sequence[Placed]) -> None:
    """UserError for a test or validation row with a label that no training row of any client has."""
    trained = {_form(example.answers[0]) for _, split, example in examples if split == "train"}
    for _, split, example in examples:
        label, where = example.answers[0], example.where
        if split != "train" and trained and _form(label) not in trained:
            raise UserError(
                f"{where}: no client has a training row with the label {label!r} of this {split} row, so it cannot be "
                "learned; add some, drop the row, or name all labels in task.labels to score it as wrong"
            )


def _plain(label: str) -> str:
    """A label as it is seen: accents composed, without white space around it or characters without width; and without
    the fraction that a column with gaps makes of whole numbers."""
    label = " ".join(cells.as_seen(label).split())
    return match[1] if (match := WHOLE.fullmatch(label)) else label


def _form(label: str) -> str:
    """A label without case, and without forms of letters (full width, ligatures): equal for labels that look alike."""
    return unicodedata.normalize("NFKC", _plain(label)).casefold()


def _check_case(seen: Mapping[str, str]) -> None:
    forms: dict[str, str] = {}
    for label, where in seen.items():
        other = forms.setdefault(_form(label), label)
        if other != label:
            what = "case" if other.casefold() == label.casefold() else "the form of its letters"
            raise UserError(
                f"{where}: the label {label!r} differs from {other!r} ({seen[other]}) in {what} only; write both "
                "alike, or give two classes names that differ"
            )
