"""What a score does not say: examples for which no answer is right, or none at all; right answers that are longer than
an answer may be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from llm_fed.method.requests import Query
from llm_fed.method.site import Site
from llm_fed.scoring.scores import find, form_of, score, without_credit
from llm_fed.tasks.common import Example


class ScoredExample(NamedTuple):
    """An example that is scored."""

    client: str
    answers: tuple[str, ...]


def notes_on_scores(sites: Iterable[Site], metric: str) -> list[str]:
    """A sentence for each split whose scores do not mean what one would think, so that none is a surprise. UserError
    for a reference that the metric cannot read."""
    requested: dict[str, list[ScoredExample]] = {}
    for site in sites if find(metric).scores == "texts" else ():
        for split, queries in site.data.queries.items():
            requested.setdefault(split, []).extend(_asked(site.id, queries))
    return [note for split, examples in requested.items() for note in _of_texts(metric, split, examples)]


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
        if isinstance(each, Example | Query):
            yield ScoredExample(client, each.answers)


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


def _example(requested: ScoredExample) -> str:
    return f"{requested.answers[0][:60]!r} of client {requested.client}"
