"""Looks at a user's data: which columns hold what, how many clients, how long, what is in it twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from llm_fed.basics.errors import UserError
from llm_fed.settings.config import Config, TaskConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.tasks.common import Example, TaskData, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLE = 2000  # examples whose tokens are measured
FEW_LABELS = 20  # different answers that look like labels
BLOCK = 32  # tokens that a length is rounded up to
FAR = 4  # times as long as nine of ten examples: beyond this an example is far out
FEW, FAR_OF_FEW = 10, 10  # of fewer examples one may well be a little longer
MOST = 5  # examples of a client from which on it is known how long they are


@dataclass(frozen=True)
class LengthLimits:
    """Which lengths of examples a run should have room for: nearly all, but not the few that are far out."""

    longest: int  # of prompt and answer together, in tokens
    answer: int  # of an answer
    skipped: Mapping[str, int]  # by client that has any: how many examples are longer


def limits(clients: Mapping[str, Sequence[tuple[int, int]]], context: int | None) -> LengthLimits:
    """What to set for examples by client, each with its tokens of prompt and answer, and of the answer alone. A client
    of long examples raises it. `context`: tokens that the base takes at most, if that is known."""
    lengths = {client: sorted(length for length, _ in pairs) for client, pairs in clients.items()}
    whole = sorted(length for own in lengths.values() for length in own)
    usual = usual_length(whole)
    raised = [usual_length(own) for own in lengths.values() if len(own) >= MOST and median(own) > usual]
    longest = min(context or whole[-1] + BLOCK, up_to_block(max([usual, *raised])))
    answers = sorted(answer for pairs in clients.values() for length, answer in pairs if length <= longest)
    answer = min(longest, up_to_block(usual_length(answers) + 1)) if answers else longest
    skipped = {client: sum(length > longest for length in own) for client, own in lengths.items()}
    return LengthLimits(longest, answer, {client: count for client, count in skipped.items() if count})


def usual_length(values: Sequence[int]) -> int:
    """The longest of the sorted values that is not FAR times as long as nine of ten."""
    scale = values[math.floor(0.9 * (len(values) - 1))]
    return max(value for value in values if value <= (FAR if len(values) >= FEW else FAR_OF_FEW) * scale)


def up_to_block(tokens: int) -> int:
    """Up to a multiple of BLOCK."""
    return BLOCK * math.ceil(tokens / BLOCK)


def samples(data: TaskData) -> dict[str, list[Example]]:
    """Examples of every client, evenly spread, at most SAMPLE in all; no other is looked at."""
    step, ahead = max(1, math.ceil(number(data) / SAMPLE)), 0
    by_client: dict[str, list[Example]] = {name: [] for name in data.clients}
    for name, client in data.clients.items():
        for part in (client.train, client.validation, client.test):
            by_client[name] += [part[index] for index in range(ahead, len(part), step)]
            ahead = (ahead - len(part)) % step
    return by_client


def number(data: TaskData) -> int:
    """How many examples there are."""
    return sum(len(client.train) + len(client.validation) + len(client.test) for client in data.clients.values())


def lengths(
    chosen: Mapping[str, Sequence[Example]], tokenizer: PreTrainedTokenizerBase, template: str, rows: int | None = None
) -> tuple[dict[str, list[tuple[int, int]]], str]:
    """By client the tokens of each example, as it will be trained, and of its answer alone; and what is not read as it
    stands, in words. UserError: an example cannot fill the template, or has a token without an embedding. `rows`: of
    the base's embedding, if they are known."""
    from llm_fed.kinds.encoding import Encoder  # seconds

    pairs = all(each.rejected for examples in chosen.values() for each in examples)
    objective = ObjectiveConfig("dpo" if pairs else "sft")
    encoder = Encoder(tokenizer, Config(task=TaskConfig(template=template), objective=objective), rows=rows)
    return {
        client: [(each.whole, each.whole - each.prompt) for each in encoder.lengths(own)]
        for client, own in chosen.items()
    }, encoder.note()


def are_labels(chosen: Sequence[Example]) -> bool:
    """Whether the answers are a few words that come again and again."""
    counts = Counter(answer.strip() for each in chosen for answer in each.answers)
    return len(counts) <= min(FEW_LABELS, len(chosen) / 3) and all(len(answer) <= 40 for answer in counts)


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


def sizes(data: TaskData) -> list[int]:
    """How many training examples each client has that has any, the smallest first. UserError: none has any."""
    if not (counts := sorted(len(client.train) for client in data.clients.values() if client.train)):
        raise UserError("no client has a training example; add some")
    return counts
