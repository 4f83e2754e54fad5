"""What every task shares: examples, pictures, clients, names of templates, tokens with a loss mask;
and when two rows are the same row, whatever file they stand in: 64 bits of what they say, and draws from these."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from llm_fed.tasks.collected import Reading
    from llm_fed.tasks.record import Record

Item = TypeVar("Item")

TEMPLATES: dict[str, str | None] = {
    "alpaca": (
        "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\n{prompt}\n\n### Response:\n"
    ),
    "alpaca-short": "### Instruction:\n{prompt}\n\n### Response:\n",
    "plain": "{prompt}\n",
    "chat": None,  # the tokenizer's own chat template
}
_PARTS, _TEXTS = "\x1d", "\x1f"  # between the parts of a row, and between the texts of a part: `plain` leaves none
WHOLE = 2**64  # of how many numbers one is drawn


@dataclass(frozen=True)
class Template:
    """What is put around a prompt."""

    name: str
    text: str  # with {prompt} in the prompt's place; with a date a chat template
    date: str | None = None  # that the chat template writes


class Turn(NamedTuple):
    """A message of a conversation."""

    role: str  # system | user | assistant | tool
    content: str
    trained: bool = True  # of the assistant: whether it is a target
    fields: str = ""  # a JSON object: what else a chat template reads of the message, such as `tool_calls`


@dataclass(frozen=True)
class Example:
    """One prompt and its answers: the first is the training target, a metric takes the best of all. A text that is
    learned as it stands is the answer to an empty prompt, around which there is no template."""

    prompt: str | tuple[Turn, ...]  # a text, or a conversation up to the turn that answers it; "": none
    answers: tuple[str, ...]
    options: tuple[str, ...] = ()  # what may be answered, for option scoring; empty: free text
    group: str = ""  # the label that a partition by label divides by, e.g. the original task
    fields: str = ""  # of a conversation's last turn, which is the answer: see `Turn`
    # The conversation, prompt and answer, to which this one is preferred; only the turns in which they differ are
    # trained. Empty: nothing is compared.
    rejected: tuple[Turn, ...] = ()
    desirable: bool | None = None  # whether the answer is; None: nothing says so
    extra: tuple[tuple[str, float], ...] = ()  # numbers for a loss of a method's own, by column
    pair: str = ""  # the second text, where pairs of texts have labels; the first is the prompt
    where: str = field(default="", compare=False, repr=False)  # file and row, for messages

    @cached_property
    def digest(self) -> int:
        """64 bits of what it says, whatever its group. The options count in any order, as many data sets shuffle them,
        and a conversation of one message is the same as its text."""
        prompt = [self.prompt] if isinstance(self.prompt, str) else list[str]()
        for turn in () if isinstance(self.prompt, str) else self.prompt:
            prompt += [turn.role, turn.content, *([turn.fields] if turn.fields else [])]
        if len(prompt) == 2 and prompt[0] == "user":
            prompt = prompt[1:]
        answers = [*self.answers, *(text for text in (self.fields, self.pair) if text)]
        for turn in self.rejected:
            answers += [turn.role, turn.content, turn.fields]
        if self.desirable is not None:
            answers.append("desirable" if self.desirable else "undesirable")
        parts = (map(plain, prompt), map(plain, answers), sorted(map(plain, self.options)))
        said = _PARTS.join(_TEXTS.join(part) for part in parts).encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "little")


@dataclass(frozen=True, eq=False)
class Picture:
    """One labelled image; the pixels of a data set's pictures are views of one tensor."""

    pixels: torch.Tensor = field(repr=False)  # (C, H, W) uint8, C = 1 (grey) or 3 (RGB)
    label: int
    group: str  # the label that a partition by label divides by, e.g. the fine class

    @cached_property
    def digest(self) -> int:
        """64 bits of its pixels."""
        shown = repr(tuple(self.pixels.shape)).encode() + self.pixels.cpu().contiguous().numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(shown, digest_size=8).digest(), "little")


def text_of(prompt: str | Sequence[Turn]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn.role}: {turn.content}" for turn in prompt)


def pixels_of(pictures: Sequence[Picture]) -> torch.Tensor:
    """(N, C, H, W) uint8, of pictures of one size."""
    return torch.stack([picture.pixels for picture in pictures])


def labels_of(pictures: Sequence[Picture]) -> torch.Tensor:
    """(N,)"""
    return torch.tensor([picture.label for picture in pictures])


@dataclass(frozen=True)
class ClientData:
    """One client's Examples or Pictures. A loader may leave splits empty, which `llm_fed.tasks.load` fills."""

    client: str
    train: Sequence[Any]
    validation: Sequence[Any] = ()
    test: Sequence[Any] = ()

    @property
    def splits(self) -> dict[str, Sequence[Any]]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


@dataclass(frozen=True)
class TaskData:
    """All clients of a task, in an order that depends on the data and the seed alone."""

    name: str
    metric: str
    clients: dict[str, ClientData]
    # Names of the classes, by label, of pictures or of texts that are classified; one name alone is that of a number
    # that is predicted. Empty: answers are texts.
    labels: tuple[str, ...] = ()
    server: ClientData | None = None  # the server's own data: what it trains on, and the test set of one model for all
    server_labels: tuple[str, ...] = ()  # names of the classes of server.train, where it is another task's
    # All clients of the data in their order, those too that `clients` lacks, as they have no example.
    everybody: tuple[str, ...] = ()
    reading: Reading | None = None  # what became of the user's own files
    kind: str = ""  # of base, see `base_kind`
    # which split each row is in; None: not made by `llm_fed.tasks.load`
    record: Record | None = field(default=None, compare=False, repr=False)

    @property
    def base_kind(self) -> str:
        """The kind of base that it is for, where `base.kind` names none."""
        return self.kind or ("images" if self.labels else "language")


@dataclass(frozen=True)
class Encoded:
    """Token ids of one sequence (T), and for each whether its prediction counts in the loss (T)."""

    input_ids: list[int]
    target: list[bool]
    extra: dict[str, float] = field(default_factory=dict)  # see `Example`

    @property
    def prompt(self) -> list[int]:
        """The ids before the first that counts in the loss; all ids where all but the first count."""
        start = self.target.index(True)
        return self.input_ids[:start] if start > 1 else self.input_ids

    @property
    def requested(self) -> list[int]:
        """The ids that the last answer follows: of a conversation with several answers, all before the last."""
        behind = len(self.target) - self.target[::-1].index(True)
        answer = next((index for index in range(behind - 1, -1, -1) if not self.target[index]), -1)
        return self.input_ids[: answer + 1]

    @property
    def answer(self) -> list[int]:
        return self.input_ids[len(self.requested) : len(self.target) - self.target[::-1].index(True)]


@dataclass(frozen=True)
class AnswerPair:
    """Two answers to a prompt, of which the first is preferred. `reference`: the log-likelihoods of both, of all tokens
    that count; 0 until the reference was asked."""

    chosen: Encoded
    rejected: Encoded
    reference: tuple[float, ...] = (0.0, 0.0)

    desirable: ClassVar[bool] = True

    @property
    def texts(self) -> tuple[Encoded, ...]:
        """Of which the reference is asked."""
        return self.chosen, self.rejected

    @property
    def prompt(self) -> list[int]:
        """See `Encoded`."""
        return self.chosen.prompt


@dataclass(frozen=True)
class Judged:
    """An answer to a prompt that is desirable, or is not. `other` is the prompt with another example's answer, by which
    KTO estimates how far the model is from the reference; `reference` as of an AnswerPair, of both."""

    text: Encoded
    desirable: bool
    other: Encoded
    reference: tuple[float, ...] = (0.0, 0.0)

    @property
    def texts(self) -> tuple[Encoded, ...]:
        """Of which the reference is asked."""
        return self.text, self.other

    @property
    def prompt(self) -> list[int]:
        """See `Encoded`."""
        return self.text.prompt


def where(examples: Sequence[Item], mask: np.ndarray) -> tuple[Item, ...]:
    """Those of N examples that a mask (N,) of bool has."""
    return tuple(compress(examples, mask.tolist()))


def plain(text: str) -> str:
    """A text without what copying and editing programs change: normal form, letter case and white space."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def digests(items: Sequence[Example | Picture]) -> np.ndarray:
    """(N,) uint64, of examples or pictures."""
    return np.fromiter((item.digest for item in items), np.uint64, len(items))


def drawn(rows: np.ndarray, seed: int) -> np.ndarray:
    """(N,) uint64: a number for each digest, uniform over all 64 bits, the same for equal digests and seeds. The
    finaliser of SplitMix64 (Steele et al. 2014), which passes for random where what goes in is a digest."""
    mixed = rows ^ np.uint64(seed % WHOLE)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
