"""What a score does not say: examples for which no answer is right; right answers that are longer than an answer may
be."""

from __future__ import annotations

from collections.abc import Collection

from llm_fed.method.requests import Query
from llm_fed.method.site import Site
from llm_fed.scoring.scores import find, without_credit
from llm_fed.tasks.common import Example


def notes_on_scores(sites: Collection[Site], metric: str) -> list[str]:
    """A sentence for each split that has examples which score 0 whatever is answered. UserError for a reference that
    the metric cannot read."""
    notes = []
    for split in dict.fromkeys(split for site in sites for split in site.data.queries):
        answers, clients = [], []
        for site in sites if find(metric).scores == "texts" else ():
            queries = site.data.queries.get(split, ())
            for each in getattr(queries, "examples", queries):  # whose tokens are not needed, see `Encodings`
                if isinstance(each, Example | Query):
                    answers.append(each.answers)
                    clients.append(site.id)
        if worthless := without_credit(metric, answers):
            first = worthless[0]
            notes.append(
                f"{len(worthless)} of {len(answers)} {split} examples score 0 under {metric} whatever is answered, "
                f"since {metric} finds too little in their references to compare, e.g. {answers[first][0][:60]!r} of "
                f"client {clients[first]}; use exact_match (eval.metric=exact_match), which compares whole texts"
            )
    return notes


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
