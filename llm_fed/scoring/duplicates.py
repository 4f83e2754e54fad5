"""Test examples that are almost training examples: the same but for a word, for punctuation, or for their order; and
tested answers that training has shown already.

Two prompts are compared by the weights of their words, the rarer the heavier, so that what a template writes in every
prompt counts for nothing: "Which bay for crate 7?" and "Which bay for crate 8?" have nothing in common.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os.path import commonprefix

import numpy as np
import regex

from llm_fed.basics.errors import one_line
from llm_fed.tasks.common import Example, TaskData, plain, text_of

ALIKE = 0.75  # share of the weight of two prompts' words that is common to both, from which on they are almost the same
ANSWERS = 0.5  # share of the words of two answers that is common to both
RELATED, SPELT = 0.4, 0.7  # from which on prompts are looked at closely, and two words are spellings of one
MOST = 500  # training prompts that a test prompt is compared with, so that time stays linear
READ = 150_000  # examples that are looked at, so that gigabytes take no minutes
SHOWN = 70  # characters of a prompt
CANDIDATES = 5  # training prompts, the most alike first, whose answers are looked at
_UNSPACED = r"\p{scx=Hani}\p{scx=Hira}\p{scx=Kana}\p{lb=SA}"  # scripts without spaces, where each character is a word
_WORD = regex.compile(rf"[{_UNSPACED}]\p{{M}}*|[[\p{{L}}\p{{N}}\p{{M}}]--[{_UNSPACED}]]+|\p{{S}}", regex.VERSION1)


@dataclass(frozen=True)
class NearDuplicates:
    """How many of the test examples are almost a training example, of any client; and of one of them the client and the
    prompt, with the client and the prompt of that training example.

    Attributes:
        every: 1, or of large data n where only every n-th example was looked at, so that most pairs are missed.
    """

    count: int
    tested: int
    pair: tuple[tuple[str, str], tuple[str, str]] | None
    every: int = 1

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
    """Counted in time that is linear in the number of words.

    Test prompts that are training prompts, apart from case and white space, do not count: `survey.repeated` counts
    them.
    """
    numbers: dict[str, int] = {}  # of each word
    every = max(1, round(sum(len(client.train) + len(client.test) for client in data.clients.values()) / READ))
    training, test = (_Prompts(data, split, numbers, every) for split in ("train", "test"))
    both = np.concatenate([training.words, test.words])
    frequency = np.bincount(both, minlength=len(numbers))
    total = len(training.examples) + len(test.examples)
    index = _PromptIndex(training, numbers, np.log(total / np.maximum(frequency, 1)))
    known = {plain(text_of(example.prompt)) for _, example in training}
    count, pair = 0, None
    for position, (client, example) in enumerate(test):
        if plain(text_of(example.prompt)) in known:
            continue
        for other in index.alike(test.of(position)):
            owner, trained = training[other]
            if _same_answer(example, trained):
                count += 1
                pair = pair or ((client, text_of(example.prompt)), (owner, text_of(trained.prompt)))
                break
    return NearDuplicates(count, len(test.examples), pair, every)


def known_answers(sites: Iterable[tuple[Sequence[Example], Sequence[Example]]]) -> str:
    """How many tested answers stand in their own client's training answers, apart from case and white space, in one
    line; empty where none does. Where all do, a client needs nobody else's knowledge.

    Args:
        sites: of each client the training and the test Examples.
    """
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


class _Prompts(Sequence[tuple[str, Example]]):
    """The examples of one split of all clients, each with its client, and the different words of their prompts.

    Attributes:
        words: (M,) the numbers of the words, of one prompt after another.
        starts: (N + 1,) where each prompt begins among these.
    """

    def __init__(self, data: TaskData, split: str, numbers: dict[str, int], every: int):
        self.examples: list[tuple[str, Sequence[Example], int]] = []
        words: list[np.ndarray] = []
        for client in data.clients.values():
            items = getattr(client, split)
            for index in range(0, len(items), every):
                example = items[index]
                self.examples.append((client.client, items, index))
                own = {numbers.setdefault(word, len(numbers)) for word in _words(text_of(example.prompt))}
                words.append(np.fromiter(own, np.int64, len(own)))
        self.words = np.concatenate(words or [np.empty(0, np.int64)])
        self.starts = np.cumsum([0, *map(len, words)])

    def of(self, index: int) -> np.ndarray:
        """The words of one prompt."""
        return self.words[self.starts[index] : self.starts[index + 1]]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
        client, items, within = self.examples[index]
        return client, items[within]


class _PromptIndex:
    """Finds the training prompts that are almost a given one.

    Two sets of words share at least ALIKE of their weight only if they share one of the heaviest words of the first,
    which together weigh more than the rest of its weight (the prefix filter of Chaudhuri et al. 2006).

    Args:
        numbers: of each word.
        weights: (V,) of each word by its number.
    """

    def __init__(self, prompts: _Prompts, numbers: Mapping[str, int], weights: np.ndarray):
        self._prompts, self._weights, self._spelling = prompts, weights, list(numbers)
        lengths = np.diff(prompts.starts)
        owners = np.repeat(np.arange(len(prompts)), lengths)
        order = np.argsort(prompts.words, kind="stable")
        self._owners = owners[order]  # of each word's prompts
        self._from = np.searchsorted(prompts.words[order], np.arange(len(weights) + 1))
        self._sums = np.bincount(owners, weights[prompts.words], len(prompts))
        self._marked = np.zeros(len(weights))

    def alike(self, words: np.ndarray) -> list[int]:
        """The indices of the most similar prompts, the most similar first."""
        total = float(self._weights[words].sum())
        candidates = self._sharing(words, (1 - ALIKE) * total)
        if not total or not len(candidates):
            return []
        self._marked[words] = self._weights[words]
        starts, lengths = self._prompts.starts[candidates], np.diff(self._prompts.starts)[candidates]
        ends = np.cumsum(lengths)
        indices = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
        shared = np.add.reduceat(self._marked[self._prompts.words[indices]], ends - lengths)
        self._marked[words] = 0
        whole = total + self._sums[candidates]
        likeness = shared / (whole - shared)
        best = np.argsort(-likeness, kind="stable")[:CANDIDATES]
        places_alike = []
        for index in best[likeness[best] >= RELATED].tolist():
            same = shared[index] + self._misspelt(words, self._prompts.of(candidates[index]))
            if same / (whole[index] - same) >= ALIKE:
                places_alike.append(int(candidates[index]))
        return places_alike

    def _sharing(self, words: np.ndarray, enough: float) -> np.ndarray:
        """The prompts that have one of the heaviest words, which together weigh more than enough; not those of words
        that too many have."""
        prompts, weight, looked_up = [], 0.0, 0
        for word in words[np.argsort(-self._weights[words])].tolist():
            owners = self._owners[self._from[word] : self._from[word + 1]]
            looked_up += len(owners)
            if weight > enough or looked_up > MOST:
                break
            if len(owners):
                prompts.append(owners)
                weight += float(self._weights[word])
        return np.unique(np.concatenate(prompts)) if prompts else np.empty(0, np.int64)

    def _misspelt(self, words: np.ndarray, others: np.ndarray) -> float:
        """The weight of the words that only one prompt has and that are almost one that only the other has, each
        counted as the lighter of the two. Numbers and names with digits are never almost the same."""
        mine, theirs = np.setdiff1d(words, others).tolist(), np.setdiff1d(others, words).tolist()
        known = {self._spelling[word]: self._weights[word] for word in theirs if self._spelling[word].isalpha()}
        weight = 0.0
        for word in mine:
            spelt = self._spelling[word]
            near = get_close_matches(spelt, known, 1, SPELT) if spelt.isalpha() and len(spelt) > 3 else []
            if near:
                weight += float(min(self._weights[word], known.pop(near[0])))
        return weight


def _around(text: str, index: int) -> str:
    """A piece of a text around a place, in one line."""
    start = max(0, index - SHOWN // 2) if len(text) > SHOWN else 0
    piece = one_line(text[start : start + SHOWN], SHOWN)
    return f"{'...' if start else ''}{piece}{'...' if start + SHOWN < len(text) else ''}"


def _words(text: str) -> list[str]:
    return _WORD.findall(plain(text))


def _same_answer(one: Example, other: Example) -> bool:
    """Whether an answer of one is almost an answer of the other."""
    for answer in one.answers:
        for trained in other.answers:
            mine, theirs = set(_words(answer)), set(_words(trained))
            if mine == theirs or len(mine & theirs) >= ANSWERS * len(mine | theirs):
                return True
    return False
