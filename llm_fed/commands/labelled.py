"""What `init` writes for texts with labels or numbers, where the base is an encoder or has a classification head."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_fed import tasks
from llm_fed.commands import columns_of, init, survey
from llm_fed.commands.columns_of import UserChoices
from llm_fed.commands.known_base import KnownBase, rates_of
from llm_fed.kinds.sequences import head_for, named_labels
from llm_fed.scoring.duplicates import near_duplicates
from llm_fed.settings.config import ColumnsConfig, TaskConfig
from llm_fed.tasks.common import Example, TaskData
from llm_fed.tasks.labelled import number

PASSES, BATCH = 10, 16  # see `init.PASSES`
CLASSES = 20  # different whole numbers up to which they are taken for classes
MOST_LABELS = 100  # that are written into the file
STEP = 8  # tokens to whose multiple the longest text is rounded up


def draft(path: Path, given: UserChoices, base: str, known: KnownBase) -> init.Draft:
    """A configuration for labelled texts.

    Raises:
        UserError: the data cannot be read, a label is none that the base's head has, or nothing says whose the rows
            are.
    """
    assert known.config is not None  # see `wanted`
    columns, partition, chosen, labels = columns_of.decide_labelled(path, given)
    name = "regression" if are_numbers(labels) else "classification"
    config = TaskConfig(name, str(path), columns=ColumnsConfig(**columns), bad_rows="skip", partition=partition)
    data = tasks.load(config, 0)
    head_for(known.config, data, base, None)  # it refuses labels that a head with names does not have
    seen = init.Seen.of(data)
    reading, examples = seen.reading, seen.examples
    longest, about_lengths, too_long = _lengths(examples, known)
    roles = {"prompt": "text", "input": "second text", "answer": "number" if name == "regression" else "label"}
    numbers = name == "regression"
    findings = {
        **init.about_clients(data, chosen),
        "columns": ", ".join(f"{roles.get(role, role)} = {column}" for role, column in reading.roles.items()),
        **seen.remarks,
        "labels": "" if numbers else _about_labels(examples, data),
        "answers": "a number for each text, scored by Pearson's correlation" if numbers
        else "one label for each text, scored by accuracy",
        "lengths": about_lengths,
        "alike": "" if any(example.pair for example in examples) else near_duplicates(data).words(),
    }  # fmt: skip
    written = list(data.labels) if not numbers and len(data.labels) <= MOST_LABELS else None
    work = init.Workload.of(survey.sizes(data), PASSES, BATCH)
    return init.composed(
        given, data, work, rates_of(known.config, answers=False), findings, seen.warnings,
        answers=False,
        task=name,
        base=base,
        columns=columns,
        labels=None if named_labels(known.config) else written,
        dealt=partition.clients,
        skipped=len(reading.skipped),
        max_length=longest,
        too_long=too_long,
        about_eval=" metric: spearman compares ranks alone." if numbers
        else " metric: f1_macro or matthews counts rare labels as much as frequent ones.",
    )  # fmt: skip


def wanted(known: KnownBase) -> bool:
    """Whether labels are what this base is for: it writes no texts, or it was saved with a classification head."""
    from llm_fed.models.families import writes

    return known.config is not None and not writes(known.config)


def are_numbers(labels: Sequence[str]) -> bool:
    """Whether labels are numbers to be predicted, and not names of classes."""
    numbers = [number(label) for label in labels]
    if any(value is None for value in numbers):
        return False
    return any(value != int(value) for value in numbers if value is not None) or len(set(numbers)) > CLASSES


def _lengths(examples: Sequence[Example], known: KnownBase) -> tuple[int | None, str, bool]:
    """The largest length to set, what was seen in words, and whether texts have to be cut."""
    tokenizer: Any = known.tokenizer
    pairs = any(example.pair for example in examples)
    first = [str(example.prompt) for example in examples]
    made = tokenizer(first, [example.pair for example in examples] if pairs else None).input_ids
    lengths = sorted(map(len, made))
    limits = getattr(known.config, "max_position_embeddings", None), tokenizer.model_max_length
    limit = min((value for value in limits if isinstance(value, int) and value > 0), default=lengths[-1])
    words = f"{lengths[len(lengths) // 2]} tokens (median), {lengths[-1]} at most"
    cut = lengths[-1] > limit
    if cut:
        more = sum(length > limit for length in lengths)
        words += f"; the base reads {limit}, so the ends of {more} of {len(lengths)} texts are cut"
    return min(limit, -(-lengths[-1] // STEP) * STEP), words, cut


def _about_labels(examples: Sequence[Example], data: TaskData) -> str:
    counts = Counter(example.answers[0] for example in examples)
    label, most = counts.most_common(1)[0]
    names = ", ".join(data.labels[:6]) + (", ..." if len(data.labels) > 6 else "")
    return (
        f"{len(data.labels)}: {names}; the most frequent is {label}, {100 * most / counts.total():.0f} % of the texts"
    )
