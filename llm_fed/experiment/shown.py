"""The first examples of each client as training and evaluation see them: what is prompt, and what is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from llm_fed import kinds, tasks
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import printable
from llm_fed.experiment import splits
from llm_fed.experiment.announce import SPLITS, CountSummary
from llm_fed.experiment.baselines import texts_of
from llm_fed.kinds.encoding import Encoder
from llm_fed.method.requests import Query
from llm_fed.method.site import Data
from llm_fed.models.loading import read_tokenizer
from llm_fed.runs.folder import holds_results, look
from llm_fed.settings.config import Config
from llm_fed.tasks.common import AnswerPair, Encoded, Example, Judged
from llm_fed.tasks.templates import filled, template_of

BEGINS, ENDS = ">>>", "<<<"  # around what is trained, in a terminal


@dataclass(frozen=True)
class ShownExample:
    """One example of a client."""

    client: str
    split: str
    text: str  # of all its tokens
    input_ids: list[int]  # (T)
    target: list[bool]  # (T): whether it counts in the loss; of a split that is scored, whether it is requested
    stop_token_ids: list[int]  # that end an answer

    def marked(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
        """The text in pieces, and of each whether it is a target."""
        pieces, end, before = [], 0, ""
        for target, run in groupby(self.target):
            end += len(list(run))
            text = str(tokenizer.decode(self.input_ids[:end]))
            pieces.append((text[len(before) :], target))
            before = text
        return pieces


@dataclass(frozen=True)
class ShownData:
    """What the clients have."""

    examples: list[ShownExample]
    example_counts: dict[str, CountSummary]  # by split, over the clients that have any
    left_out: dict[str, int]  # by split, examples that are longer than `task.max_length` tokens
    note: str  # what was left out or not read as it stands, in words; may be empty
    tokenizer: PreTrainedTokenizerBase

    def as_json(self) -> dict[str, Json]:
        """The data as JSON values."""
        return {
            "example_counts": {split: asdict(counts) for split, counts in self.example_counts.items()},
            "left_out": self.left_out,
            "note": self.note,
            "examples": [asdict(example) for example in self.examples],
        }

    def for_terminal(self) -> Iterator[tuple[str, bool]]:
        """Pieces of text, and of each whether it is to be seen at once."""
        for example in self.examples:
            what = "trained" if example.split.startswith("training") else "asked for"
            numbers = f"{len(example.input_ids)} tokens, {sum(example.target)} of them {what}"
            yield f"{example.client}, {example.split}: {numbers}\n", False
            for text, target in example.marked(self.tokenizer):
                yield f"{BEGINS}{printable(text)}{ENDS}" if target else printable(text), target
            yield "\n" if example.text.endswith("\n") else "\n\n", False
        stops = self.examples[0].stop_token_ids if self.examples else []
        names = ", ".join(f"{self.tokenizer.convert_ids_to_tokens(id)} ({id})" for id in stops)
        yield f"An answer ends at one of these tokens: {printable(names)}.\n", False
        if self.note:
            yield f"{self.note}\n", False


def shown(config: Config, folder: Path, most: int, *, fresh: bool = False) -> ShownData:
    """The first examples of each client and split, as a run in a folder has them. Of the base the tokenizer is loaded
    alone. UserError: the task is one of pictures, or the data or the tokenizer cannot be read. UserError, RunError: a
    run in the folder has other settings, or is damaged."""
    kinds.check_writes(config, "--show shows what language models read, but this task trains {noun}s; leave it out")
    _, _, config = look(folder, config, fresh)
    run = splits.known(folder, config, begins=fresh or not holds_results(folder))
    data = tasks.load(config.task, config.federation_seed, config.evaluation_seed, run.all)
    tokenizer, stops, rows = read_tokenizer(config.base)
    template = template_of(config.task.template, tokenizer)
    ends = sorted({*stops, *filled(template, tokenizer).ends})
    texts = Encoder(tokenizer, config, template, rows)
    parties = dict(data.clients) | ({"server": data.server} if data.server else {})
    examples: list[ShownExample] = []
    counts: dict[str, list[int]] = {split: [] for split in SPLITS}
    for client, given in parties.items():
        known = texts.data(client, given, Data())
        held: Any = zip(SPLITS, (known.train, known.queries["validation"], known.queries["test"]), strict=True)
        for split, items in held:
            if client in data.clients:
                counts[split].append(len(items))
            for item, example in zip(items[:most], texts_of(items), strict=False):
                for name, each in _each(split, item):
                    ids, target = _parts(each, texts, example)
                    examples.append(ShownExample(client, name, str(tokenizer.decode(ids)), ids, target, ends))
    numbers = {split: CountSummary.of(each) for split, each in counts.items()}
    return ShownData(examples, numbers, dict(texts.skipped), texts.note(), tokenizer)


def _each(split: str, item: Any) -> list[tuple[str, Any]]:
    """What is shown of an item, with the words for it: of a pair both answers."""
    if isinstance(item, AnswerPair):
        return [(f"{split}, chosen", item.chosen), (f"{split}, rejected", item.rejected)]
    if isinstance(item, Judged):
        return [(f"{split}, {'desirable' if item.desirable else 'undesirable'}", item.text)]
    return [(split, item)]


def _parts(item: Encoded | Query, encoder: Encoder, example: Example) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them are targets; of a query what is asked, and the first reference as target."""
    if isinstance(item, Encoded):
        return item.input_ids, item.target
    if not example.answers:
        return item.prompt, [False] * len(item.prompt)
    encoded = encoder.encoded(example)
    start = len(encoded.requested)
    return [*item.prompt, *encoded.input_ids[start:]], [*[False] * len(item.prompt), *encoded.target[start:]]
