"""The encoding of texts: a site's examples as tokens, and what became of those that are too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from llm_fed.kinds.encoding import Encoder, NoneFits
from llm_fed.kinds.kind import in_scored_order
from llm_fed.method.requests import Query
from llm_fed.method.site import Data
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.tasks.common import ClientData, Example, TaskData

ABILITY_TOKENS = 128  # of a paragraph of `eval.ability`, which is cut there; most have 80


class Texts:
    """The encoding of a task's texts. How long all are is found out at the start, many at once."""

    def __init__(self, encoder: Encoder, config: Config, task: TaskData):
        self._encoder, self._config = encoder, config
        parties = [*task.clients.values(), *([task.server] if task.server else [])]
        splits = (split for given in parties for split in (given.train, given.validation, given.test))
        self._lengths = encoder.lengths(splits)
        self._ability = _fixed_text(encoder) if config.eval.ability and not config.objective.preferences else ()

    def note(self) -> str:
        return self._encoder.note()

    def data(self, id: str, given: ClientData, data: Data) -> Data:
        encoder, config = self._encoder, self._config
        before, (train, validation, test) = encoder.skipped.copy(), islice(self._lengths, 3)
        none_fits: list[str] = []

        def fitting(encode: Callable[..., Sequence[Any]], split: str, *words: Any, **options: Any) -> Sequence[Any]:
            try:
                return encode(id, split, *words, **options)
            except NoneFits as error:
                none_fits.append(str(error))
                return ()

        held_out = encoder.training(id, "validation", given.validation, required=False, lengths=validation)
        queries = {}
        for split, lengths in (("validation", validation), ("test", test)):
            examples, known = (
                in_scored_order(items, given, split, config) for items in (getattr(given, split), lengths)
            )
            queries[split] = fitting(encoder.queries, split, examples, config.eval.limit, known)
        cut = {split: lengths_cut for split, requested in queries.items() if (lengths_cut := encoder.cut(requested))}
        return replace(
            data,
            train=fitting(encoder.training, "training", given.train, lengths=train),
            held_out=held_out, queries=queries, left_out=encoder.skipped - before, cut=cut, none_fits=tuple(none_fits),
            ability=self._ability,
        )  # fmt: skip


def _fixed_text(encoder: Encoder) -> Sequence[Query]:
    """The paragraphs of the text of `eval.ability`, as they stand and the same for all data."""
    text = (Path(__file__).parents[1] / "assets" / "ability.txt").read_text(encoding="utf-8")
    plain = TaskConfig(template="plain", max_length=ABILITY_TOKENS, too_long="cut-end")
    examples = [Example("", (paragraph,)) for paragraph in text.strip().split("\n\n")]
    return Encoder(encoder.tokenizer, plain, rows=encoder.rows).queries("", "ability", examples)
