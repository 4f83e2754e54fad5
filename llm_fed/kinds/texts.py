"""The encoding of texts: a site's examples as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm_fed.kinds.encoding import Encoder, NoneFits
from llm_fed.kinds.kind import in_scored_order
from llm_fed.method.requests import Query
from llm_fed.method.site import Data
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.tasks.common import ClientData, Example

ABILITY_TOKENS = 128  # of a paragraph of `eval.ability`, which is cut there; most have 80


class Texts:
    """The encoding of a task's texts."""

    def __init__(self, encoder: Encoder, config: Config):
        self._encoder, self._config = encoder, config
        self._ability = _fixed_text(encoder) if config.eval.ability and not config.objective.preferences else ()

    def note(self) -> str:
        return self._encoder.note()

    def data(self, id: str, given: ClientData, data: Data) -> Data:
        encoder, config, none_fits = self._encoder, self._config, list[str]()
        before = encoder.skipped.copy()

        def fitting(encode: Callable[..., Sequence[Any]], split: str, *given: Any) -> Sequence[Any]:
            try:
                return encode(id, split, *given)
            except NoneFits as error:
                none_fits.append(str(error))
                return ()

        held_out = encoder.training(id, "validation", given.validation, required=False)
        queries = {}
        for split in ("validation", "test"):
            examples = in_scored_order(getattr(given, split), given, split, config)
            queries[split] = fitting(encoder.queries, split, examples, config.eval.limit)
        cut = {split: lengths for split, requested in queries.items() if (lengths := encoder.cut(requested))}
        train = fitting(encoder.training, "training", given.train)
        return replace(
            data, train=train, held_out=held_out, queries=queries, left_out=encoder.skipped - before, cut=cut,
            none_fits=tuple(none_fits), ability=self._ability,
        )  # fmt: skip


def _fixed_text(encoder: Encoder) -> Sequence[Query]:
    """The paragraphs of the text of `eval.ability`, as they stand and the same for all data."""
    text = (Path(__file__).parents[1] / "assets" / "ability.txt").read_text(encoding="utf-8")
    plain = TaskConfig(template="plain", max_length=ABILITY_TOKENS, too_long="cut-end")
    examples = [Example("", (paragraph,)) for paragraph in text.strip().split("\n\n")]
    return Encoder(encoder.tokenizer, plain, rows=encoder.rows).queries("", "ability", examples)
