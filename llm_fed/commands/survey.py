"""Looks at a user's data: which columns hold what, how many clients, which script, how long, what is in it twice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import regex

from llm_fed.errors import UserError
from llm_fed.experiment import taking_part
from llm_fed.tasks.common import ClientData, Example, TaskData, template_of, text_of
from llm_fed.tasks.conversations import encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Besides the names that the task `files` takes by itself.
LIKELY = {
    "prompt": ("query", "text", "source", "user", "human", "sentence", "title", "问题", "指令", "提示", "输入"),
    "answer": ("reply", "label", "summary", "assistant", "target_text", "gold", "translation", "回答", "答案", "输出"),
    "client": ("site", "hospital", "clinic", "user_id", "role", "author", "speaker", "domain", "group", "客户"),
}
SCRIPTS = (
    "Latin",
    "Han",
    "Hiragana",
    "Katakana",
    "Hangul",
    "Cyrillic",
    "Greek",
    "Arabic",
    "Hebrew",
    "Devanagari",
    "Thai",
)
SCRIPT = regex.compile("|".join(rf"(?P<{name}>\p{{Script={name}}})" for name in SCRIPTS))
SAMPLE = 2000  # examples whose letters are counted and whose tokens are measured
FEW = 20  # different answers that look like labels
BLOCK = 32  # tokens that a length is rounded up to


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompt and answer together, and of the answer alone, of a sample of the examples, sorted."""

    whole: list[int]
    answers: list[int]

    @property
    def enough(self) -> int:
        """The longest, or where it is far out what 99 of 100 need; rounded up."""
        most, nearly = self.whole[-1], quantile(self.whole, 0.99)
        return rounded(most if most <= 1.5 * nearly else nearly)

    @property
    def enough_answer(self) -> int:
        """What 99 of 100 answers need, with some room."""
        return rounded(quantile(self.answers, 0.99) + 1)


def likely(role: str, names: Sequence[str]) -> str | None:
    """The column that probably holds a role, by its name; see `rows.USUAL_NAMES` for those that need no guess."""
    lowered = {name.strip().lower(): name for name in reversed(names)}
    return next((lowered[name] for name in LIKELY.get(role, ()) if name in lowered), None)


def examples(data: TaskData) -> Iterator[Example]:
    """All of all clients and splits."""
    for client in data.clients.values():
        yield from (*client.train, *client.validation, *client.test)


def sample(data: TaskData) -> list[Example]:
    """Examples of every client, evenly spread, at most SAMPLE."""
    everything = list(examples(data))
    return everything[:: math.ceil(len(everything) / SAMPLE)]


def scripts(texts: Iterable[str]) -> list[tuple[str, float]]:
    """(script, share of the letters), the largest first, those above 5 %."""
    counts = Counter(found.lastgroup for text in texts for found in SCRIPT.finditer(text))
    total = sum(counts.values())
    return [(str(name), count / total) for name, count in counts.most_common() if count > total / 20]


def lengths(chosen: Sequence[Example], tokenizer: PreTrainedTokenizerBase, template: str) -> Lengths:
    """As they will be trained."""
    around = template_of(template, tokenizer)
    found = [encoded(each, tokenizer, around) for each in chosen]
    return Lengths(
        sorted(len(each.input_ids) for each in found),
        sorted(sum(each.target) for each in found),
    )


def are_labels(chosen: Sequence[Example]) -> bool:
    """Whether the answers are a few words that come again and again."""
    counts = Counter(answer.strip() for each in chosen for answer in each.answers)
    return len(counts) <= min(FEW, len(chosen) / 3) and all(len(answer) <= 40 for answer in counts)


def repeated(data: TaskData) -> dict[str, int]:
    """What is in the data twice, each with its number; only what there is.

    Prompts are compared without regard to case and white space.
    """

    def key(example: Example) -> str:
        return " ".join(text_of(example.prompt).split()).casefold()

    found: Counter[str] = Counter()
    trained: dict[str, set[str]] = {name: {key(each) for each in part.train} for name, part in data.clients.items()}
    holders = Counter(prompt for prompts in trained.values() for prompt in prompts)
    for name, client in data.clients.items():
        own = trained[name]
        rows = Counter((key(each), each.answers) for each in client.train)
        found["training examples occur twice at the same client"] += sum(rows.values()) - len(rows)
        for each in client.test:
            if key(each) in own:
                found["test prompts also occur in the same client's training examples"] += 1
            elif holders[key(each)]:
                found["test prompts also occur in another client's training examples"] += 1
    return {what: count for what, count in found.items() if count}


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
    found = {
        taking_part.LEFT_OUT: [name for name in data.everybody if name not in data.clients],
        f"{taking_part.ONLY_TESTED}, or left out by methods of personal models": [
            client.client for client in clients if not client.train
        ],
        taking_part.UNSCORED: [client.client for client in clients if not client.test],
    }
    return {what: names for what, names in found.items() if names}


def quantile(ordered: Sequence[int], share: float) -> int:
    """The smallest of the sorted numbers that at least this share of them does not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def rounded(tokens: int) -> int:
    """Up to a multiple of BLOCK."""
    return BLOCK * math.ceil(tokens / BLOCK)
