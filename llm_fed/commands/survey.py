"""Looks at a user's data: which columns hold what, how many clients, how long, what is in it twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from llm_fed.basics.errors import UserError
from llm_fed.bench import taking_part
from llm_fed.settings.config import TaskConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks.common import ClientData, Example, TaskData, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = 2000  # examples whose tokens are measured
FEW = 20  # different answers that look like labels


def samples(data: TaskData) -> dict[str, list[Example]]:
    """Examples of every client, evenly spread, at most SAMPLE in all."""
    step = max(1, math.ceil(number(data) / SAMPLE))
    ahead, by_client = 0, {}
    for name, client in data.clients.items():
        by_client[name] = examples = list[Example]()
        for part in _parts(client):
            examples += [part[index] for index in range(ahead, len(part), step)]
            ahead = (ahead - len(part)) % step
    return by_client


def number(data: TaskData) -> int:
    """How many examples there are."""
    return sum(len(part) for client in data.clients.values() for part in _parts(client))


def _parts(client: ClientData) -> tuple[Sequence[Any], ...]:
    return client.train, client.validation, client.test


def lengths(
    chosen: Mapping[str, Sequence[Example]], tokenizer: PreTrainedTokenizerBase, template: str, rows: int | None = None
) -> tuple[dict[str, list[tuple[int, int]]], str]:
    """By client the tokens of each example, as it will be trained, and of its answer alone; and what is not read as it
    stands, in words.

    Args:
        rows: of the base's embedding, if they are known.

    Raises:
        UserError: an example cannot fill the template, or has a token without an embedding.
    """
    from llm_fed.kinds.encoding import Encoder  # seconds

    pairs = all(each.rejected for examples in chosen.values() for each in examples)
    objective = ObjectiveConfig("dpo" if pairs else "sft")
    encoder = Encoder(tokenizer, TaskConfig(template=template), rows=rows, objective=objective)
    return {
        client: [(each.whole, each.whole - each.prompt) for each in encoder.lengths(own)]
        for client, own in chosen.items()
    }, encoder.note()


def are_labels(chosen: Sequence[Example]) -> bool:
    """Whether the answers are a few words that come again and again."""
    counts = Counter(answer.strip() for each in chosen for answer in each.answers)
    return len(counts) <= min(FEW, len(chosen) / 3) and all(len(answer) <= 40 for answer in counts)


def repeated(data: TaskData) -> dict[str, int]:
    """What is in the data twice, each with its number; only what there is.

    Prompts are compared without regard to case and white space.
    """

    def key(example: Example) -> int:  # texts may be long, and there may be millions
        said = f"{text_of(example.prompt)} {example.pair}".strip() or example.answers[0]
        return hash(" ".join(said.split()).casefold())

    counts: Counter[str] = Counter()
    trained: dict[str, set[int]] = {}
    for name, client in data.clients.items():
        rows = [(key(each), hash(each.answers)) for each in client.train]
        trained[name] = {prompt for prompt, _ in rows}
        counts["training examples that occur twice at the same client"] += len(rows) - len(set(rows))
    holders = Counter(prompt for prompts in trained.values() for prompt in prompts)
    for name, client in data.clients.items():
        own = trained[name]
        for each in client.test:
            if key(each) in own:
                counts["test prompts that also occur in the same client's training examples"] += 1
            elif holders[key(each)]:
                counts["test prompts that also occur in another client's training examples"] += 1
    return {what: count for what, count in counts.items() if count}


def sizes(clients: Iterable[ClientData]) -> tuple[int, float, int]:
    """Training examples of the smallest client that has any, of the median one, and of the largest.

    Raises:
        UserError: none has any.
    """
    counts = sorted(len(client.train) for client in clients if client.train)
    if not counts:
        raise UserError("no client has a training example; add some")
    return counts[0], median(counts), counts[-1]


def missing(data: TaskData) -> dict[str, list[str]]:
    """The clients that do not train or are not scored, by what becomes of them in words; empty where all do both."""
    clients = data.clients.values()
    lacking = {
        taking_part.LEFT_OUT: [name for name in data.everybody if name not in data.clients],
        f"{taking_part.ONLY_TESTED}, or left out by methods of personal models": [
            client.client for client in clients if not client.train
        ],
        taking_part.UNSCORED: [client.client for client in clients if not client.test],
    }
    return {what: names for what, names in lacking.items() if names}
