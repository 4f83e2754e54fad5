"""Test examples that are almost training examples: the same but for a word, for punctuation, or for their order; and
tested answers that training has shown already.

Two prompts are compared by the weights of their words, the rarer the heavier, so that what a template writes in every
prompt counts for nothing: "Which bay for crate 7?" and "Which bay for crate 8?" have nothing in common.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import log
from os.path import commonprefix

import regex

from llm_fed.basics.errors import one_line
from llm_fed.tasks.common import Example, TaskData, plain, text_of

ALIKE = 0.75  # share of the weight of two prompts' words that is common to both, from which on they are almost the same
ANSWERS = 0.5  # share of the words of two answers that is common to both
MOST = 200  # training prompts that a test prompt is compared with, so that time stays linear
READ = 20_000  # examples that are looked at, so that gigabytes take no minutes
SHOWN = 70  # characters of a prompt
CANDIDATES = 5  # training prompts, the most alike first, whose answers are looked at
_UNSPACED = r"\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{lb=SA}"  # scripts without spaces, where each character is a word
_WORD = regex.compile(rf"[{_UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{N}}\p{{M}}]--[{_UNSPACED}]]+|\p{{S}}", regex.VERSION1)


@dataclass(frozen=True)
class NearDuplicates:
    """How many of the test examples are almost a training example, of any client."""

    count: int
    tested: int
    # Of one of them client and prompt, and client and prompt of that training example.
    pair: tuple[tuple[str, str], tuple[str, str]] | None
    every: int = 1  # n where of large data only every n-th example was looked at, so that most pairs are missed

    def words(self) -> str:
        """In one line; empty where there is none."""
        if self.pair is None:
            return ""
        (client, prompt), (owner, trained) = self.pair
        alike = len(commonprefix([prompt, trained]))
        one, other = (_around(text, alike) for text in (prompt, trained))
        are = "is" if self.count == 1 else "are"
        return (
            f"{self.count} of {self.tested} test examples {are} almost a training example, such as {one!r} of {client} "
            f"and {other!r} of {owner}"
            + (f"; only one example in {self.every} was looked at" if self.every > 1 else "")
        )


def near_duplicates(data: TaskData) -> NearDuplicates:
    """Counted in time that is linear in the number of words; without test prompts that are training prompts, apart from
    case and white space, which `survey.repeated` counts."""
    every = max(1, round(sum(len(client.train) + len(client.test) for client in data.clients.values()) / READ))
    training, test = (
        [
            (client.client, example, frozenset(_words(text_of(example.prompt))))
            for client in data.clients.values()
            for example in (client.train if split == "train" else client.test)[::every]
        ]
        for split in ("train", "test")
    )
    index = _PromptIndex([words for _, _, words in training], [words for _, _, words in test])
    known = {plain(text_of(example.prompt)) for _, example, _ in training}
    count, pair = 0, None
    for client, example, words in test:
        if plain(text_of(example.prompt)) in known:
            continue
        alike = (training[other] for other in index.alike(words))
        if found := next(((owner, its) for owner, its, _ in alike if _same_answer(example, its)), None):
            count += 1
            pair = pair or ((client, text_of(example.prompt)), (found[0], text_of(found[1].prompt)))
    return NearDuplicates(count, len(test), pair, every)


def known_answers(sites: Iterable[tuple[Sequence[Example], Sequence[Example]]]) -> str:
    """How many tested answers stand in their own client's training answers, apart from case and white space, in one
    line; empty where none does. Where all do, a client needs nobody else's knowledge. `sites`: of each client the
    training and the test Examples."""
    found: list[str] = []
    tested = 0
    for train, test in sites:
        shown, tested = {plain(each.answers[0]) for each in train}, tested + len(test)
        own = ([answer for answer in map(plain, each.answers) if answer in shown] for each in test)
        found += [answers[0] for answers in own if answers]
    if not found:
        return ""
    return (
        f"{len(found)} of {tested} tested answers stand in the client's own training rows ({len(set(found))} different)"
    )


class _PromptIndex:
    """Finds the training prompts that are almost a given one.

    Two sets of words share at least ALIKE of their weight only if they share one of the heaviest words of the first,
    which together weigh more than the rest of its weight (the prefix filter of Chaudhuri et al. 2006).
    """

    def __init__(self, training: Sequence[frozenset[str]], test: Sequence[frozenset[str]]):
        frequency, total = Counter(chain.from_iterable([*training, *test])), len(training) + len(test)
        self._prompts, self._weight = training, {word: log(total / count) for word, count in frequency.items()}
        self._owners: dict[str, list[int]] = defaultdict(list)
        for number, words in enumerate(training):
            for word in words:
                self._owners[word].append(number)

    def alike(self, words: frozenset[str]) -> list[int]:
        """The indices of the most similar prompts, the most similar first."""
        others = {number: self._prompts[number] for number in self._sharing(words)}
        likeness = {n: self._sum(words & other) / self._sum(words | other) for n, other in others.items()}
        return sorted((n for n in likeness if likeness[n] >= ALIKE), key=lambda n: -likeness[n])[:CANDIDATES]

    def _sharing(self, words: frozenset[str]) -> list[int]:
        """The prompts that have one of the heaviest words; not those of words that too many have."""
        found: dict[int, None] = {}
        weight, enough, looked_up = 0.0, (1 - ALIKE) * self._sum(words), 0
        for word in sorted(words, key=lambda word: (-self._weight[word], word)):
            owners = self._owners.get(word, [])
            looked_up += len(owners)
            if weight > enough or looked_up > MOST:
                break
            found |= dict.fromkeys(owners)
            weight += self._weight[word] * bool(owners)
        return [*found] if enough else []

    def _sum(self, words: frozenset[str]) -> float:
        return sum(self._weight[word] for word in words)


def _around(text: str, index: int) -> str:
    """A piece of a text around a place, in one line."""
    start = max(0, index - SHOWN // 2) if len(text) > SHOWN else 0
    piece = one_line(text[start : start + SHOWN], SHOWN)
    return f"{'...' if start else ''}{piece}{'...' if start + SHOWN < len(text) else ''}"


def _words(text: str) -> list[str]:
    return _WORD.findall(plain(text))


def _same_answer(one: Example, other: Example) -> bool:
    """Whether an answer of one is almost an answer of the other."""
    pairs = ((set(_words(mine)), set(_words(theirs))) for mine in one.answers for theirs in other.answers)
    return any(mine == theirs or len(mine & theirs) >= ANSWERS * len(mine | theirs) for mine, theirs in pairs)
