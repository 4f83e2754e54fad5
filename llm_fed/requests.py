"""What sites ask for: requests and their content, and the protocols of those who answer them.

Shape letters: N images.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from llm_fed.models.joined import Answer
from llm_fed.rng import generator
from llm_fed.state import State
from llm_fed.tasks.augmentation import augmented
from llm_fed.tasks.common import Encoded


@dataclass(frozen=True)
class Request:
    """Work that a site asks for: awaiting it returns its result. Requests with equal `key` may be executed fused."""

    kind: str
    site: str
    key: Hashable
    payload: Any

    def __await__(self) -> Generator[Request, Any, Any]:
        return (yield self)


# Of a whole image model: the loss of a batch from its answer, its labels (N,), and the places (N,) of its pictures.
Loss = Callable[[Answer, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Job:
    """What one client trains: from `start`, one optimizer step per entry of `batches`."""

    client: str
    start: State
    batches: Sequence[Sequence[Any]]  # examples of one kind, see `engine.examples`
    lr: float
    train: str = r".*"  # regular expression of the entries that are trained
    seed: int = 0  # of dropout and of augmentation
    mix: tuple[float, ...] | None = None  # the weight of each expert while it trains, where the gate is `mix`
    # Where given, the loss is the divergence of the model's predictions from those of the teachers' mean logits.
    teachers: Sequence[State] = ()
    # Of whole image models: a loss of the method's own, which is also told the places of a batch's examples.
    loss: Loss | None = None
    places: Sequence[Sequence[int]] = ()
    lr_of: Mapping[str, float] = field(default_factory=dict)  # another lr, by regular expression of entries

    def examples(self, step: int, augment: str | None) -> Sequence[Any]:
        """What is trained on at a step. A pupil's pictures stay as they are: so its teachers answered to them."""
        if augment is None or self.teachers:
            return self.batches[step]
        return augmented(self.batches[step], augment, generator(self.seed, "augment", step))


@dataclass(frozen=True)
class GradientOf:
    """What a site asks: the mean loss of the examples and its gradient at `state`."""

    state: State
    examples: Sequence[Any]
    head: State | None = None  # of an image model: a linear head (weight, bias) in the place of its own


@dataclass(frozen=True)
class HeadJob:
    """What a site asks: a linear head trained on the features that an image model has of the examples."""

    state: State  # of the model
    head: State  # (weight, bias): where training starts
    examples: Sequence[Any]
    batches: Sequence[Sequence[int]]  # indices of examples, one list per step of Adam
    lr: float


@dataclass(frozen=True)
class GradientJob:
    """What one client asks: the gradients of the same examples at two states."""

    client: str
    first: State
    second: State
    examples: Sequence[Any]  # of one kind, see `engine.examples`
    sampled: bool = False  # whether the Fisher information takes labels drawn from the models
    seed: int = 0  # of those labels


@dataclass(frozen=True)
class Fitted:
    """A client's result: its state, and the mean loss per target at each step."""

    state: State
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Work:
    """What a fit processed: real tokens (of pictures what they count as), tokens with padding, micro-batches, and the
    token budget of each."""

    tokens: int = 0
    padded: int = 0
    micro_batches: int = 0
    budget: int = 0

    @property
    def padding(self) -> float:
        """The share of padding among all tokens processed."""
        return 1 - self.tokens / self.padded if self.padded else 0.0

    def plus(self, other: Work) -> Work:
        """Both together, with the budget of `other`, the later one."""
        return Work(
            self.tokens + other.tokens,
            self.padded + other.padded,
            self.micro_batches + other.micro_batches,
            other.budget,
        )


@dataclass(frozen=True)
class Query:
    """One example to be answered in an evaluation."""

    prompt: list[int]  # token ids after the template
    answers: tuple[str, ...]  # references
    options: tuple[list[int], ...] = ()  # token ids of each option, for scoring without generation
    correct: int = -1  # which option is right
    example: Encoded | None = None  # with its first answer, as training would see it; None where it is too long


class Engine(Protocol):
    """Executes what sites await: `LanguageEngine` or `VisionEngine`, of `engine/`."""

    work: Work

    def execute(self, requests: Sequence[Request]) -> Sequence[Any]:
        """One result, or one exception, for each of these requests of equal kind and key."""
        ...


class Runtime(Protocol):
    """Runs the coroutines of sites; see `runtime/`."""

    def run(self, work: Mapping[str, Coroutine[Any, Any, Any]]) -> dict[str, Any]: ...

    def take_work(self) -> Any: ...
