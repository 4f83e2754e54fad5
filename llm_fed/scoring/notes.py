"""What a score does not say: examples for which no answer is right, or none at all; answers that are the same to a
metric; right answers that are longer than an answer may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from llm_fed.method.requests import Query
from llm_fed.method.site import Site
from llm_fed.scoring.scores import find, form_of, score, without_credit
from llm_fed.tasks.common import Example

LABELS = 20  # so few different answers to at least twice as many prompts are labels
SHORT = 80  # letters; longer references are hardly ever the same to a metric
_NUMBER = re.compile(r"[-+\u2212]?\d+(?:[.,]\d+)*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


class ScoredExample(NamedTuple):
    """An example that is scored."""

    client: str
    answers: tuple[str, ...]
    options: tuple[str, ...]


def notes_on_scores(sites: Iterable[Site], metric: str) -> list[str]:
    """A sentence for each split whose scores do not mean what one would think, so that none is a surprise. UserError
    for a reference that the metric cannot read."""
    requested: dict[str, list[ScoredExample]] = {}
    for site in sites:
        for split, queries in site.data.queries.items():
            requested.setdefault(split, []).extend(_asked(site.id, queries))
    if find(metric).scores == "options":
        notes = _twice
    elif find(metric).scores == "texts":
        notes = _of_texts
    else:
        return []
    return [note for split, examples in requested.items() for note in notes(metric, split, examples)]


def notes_on_length(sites: Collection[Site], most: int) -> dict[str, str]:
    """By split, a note where right answers are longer than the `most` tokens of an answer (`Data.cut`)."""
    notes = {}
    for split in dict.fromkeys(split for site in sites for split in site.data.cut):
        lengths = [length for site in sites for length in site.data.cut.get(split, ())]
        number = sum(len(site.data.queries[split]) for site in sites if site.data.queries.get(split))
        longest = max(lengths)
        if longest > most:
            how = f"are longer than eval.max_new_tokens={most} tokens (the longest has {longest})"
            what = f"set eval.max_new_tokens={longest}"
        else:
            how, what = "do not fit into the base's context after their prompts", "lower task.max_length"
        notes[split] = (
            f"{len(lengths)} of {number} {split} references {how}, so that even a perfect answer is cut and scores "
            f"less; {what}"
        )
    return notes


def _asked(client: str, queries: Sequence[object]) -> Iterator[ScoredExample]:
    for each in getattr(queries, "examples", queries):  # whose tokens are not needed, see `Encodings`
        if isinstance(each, Example):
            yield ScoredExample(client, each.answers, each.options)
        elif isinstance(each, Query):
            yield ScoredExample(client, each.answers, ())


def _of_texts(metric: str, split: str, requested: Sequence[ScoredExample]) -> Iterator[str]:
    use = "use exact_match (eval.metric=exact_match), which compares whole texts"
    if worthless := without_credit(metric, [each.answers for each in requested]):
        yield (
            f"{len(worthless)} of {len(requested)} {split} examples score 0 under {metric} whatever is answered, since "
            f"{metric} finds too little in their references to compare, e.g. {_example(requested[worthless[0]])}; {use}"
        )
    form = form_of(metric)
    if form is None:
        return
    without = (each for each in requested if any(not form(text) for text in each.answers))
    empty = [each for each in without if score(metric, [""], [each.answers]) > 0]
    if empty:
        yield (
            f"{len(empty)} of {len(requested)} {split} examples are right under {metric} without any answer, since "
            f"{metric} finds nothing in their references to compare, e.g. {_example(empty[0])}"
            + ("" if metric == "exact_match" else f"; {use}")
        )
    if pairs := _conflated(form, requested):
        yield (
            f"{metric} takes {' and '.join(map(repr, pairs[0]))} for the same answer, and both are {split} references"
            + (f" ({len(pairs)} such pairs)" if len(pairs) > 1 else "")
            + ("" if metric == "exact_match" else f"; {use}")
        )


def _example(requested: ScoredExample) -> str:
    return f"{requested.answers[0][:60]!r} of client {requested.client}"


def _conflated(form: Callable[[str], object], requested: Sequence[ScoredExample]) -> list[list[str]]:
    """References that differ as texts but not to the metric, where that matters: different numbers, or labels."""
    texts = {text for each in requested for text in each.answers if len(text) <= SHORT}
    labels = len(texts) <= LABELS and 2 * len(texts) <= len(requested)
    by_form: dict[object, list[str]] = {}
    for text in sorted(texts):
        if labels or _NUMBER.search(text):
            by_form.setdefault(form(text), []).append(text)
    return [
        alike for key, alike in by_form.items()
        if key and len(alike) > 1 and (labels or len({tuple(_numbers(text)) for text in alike}) > 1)
    ]  # fmt: skip


def _numbers(text: str) -> list[str]:
    return _NUMBER.findall(_THOUSANDS.sub("", text))


def _twice(metric: str, split: str, requested: Sequence[ScoredExample]) -> Iterator[str]:
    if twice := [each for each in requested if len(set(each.options)) < len(each.options)]:
        yield (
            f"{len(twice)} of {len(requested)} {split} examples have an option twice, which counts as one, e.g. "
            f"{twice[0].options} of client {twice[0].client}"
        )
