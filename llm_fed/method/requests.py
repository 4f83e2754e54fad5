"""What sites ask for: one dataclass for each kind of work, with the type of its result; and the protocols of those who
answer.

Shape letters: N examples, C classes, H features, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import ClientError, RunError
from llm_fed.basics.rng import Secret, generator
from llm_fed.merge.moments import Evidence
from llm_fed.method.optimizer import Optimizer
from llm_fed.models.joined import Answer
from llm_fed.models.structure import Structure
from llm_fed.state import State
from llm_fed.tasks.common import AnswerPair, Encoded, Judged, Picture, pixels_of

Result = TypeVar("Result")
Item = TypeVar("Item")  # an example of one kind, see `engine.examples`
Given = TypeVar("Given")


@dataclass(frozen=True, eq=False)
class Request(Generic[Result]):
    """Work that a site asks for: awaiting it returns its result. Those of one type and structure may run fused."""

    site: str
    structure: Structure

    def __await__(self) -> Generator[Request[Result], Result, Result]:
        return (yield self)


@dataclass(frozen=True)
class Fitted:
    """A client's result: its state, and the mean loss per target at each step."""

    state: State
    losses: tuple[float, ...]


# A loss of a method's own. Of a whole image model: that of a batch, of its answer, labels (N,) and the indices (N,)
# of its pictures. Of adapters: that of each of n targets, from logits (n, C), targets (n,) and columns of n numbers.
Loss = Callable[[Any, Tensor, Any], Tensor]


@dataclass(frozen=True, eq=False)
class Distillation:
    """A loss: the divergence of the model's predictions from those of the teachers' mean logits; without labels."""

    teachers: Sequence[State]


@dataclass(frozen=True)
class PerExample:
    """The gradient of a step by DP-SGD (Abadi et al. 2016, Algorithm 1): that of each example's own mean loss is
    clipped, Gaussian noise of standard deviation `noise * clip` is added to the sum, and all is divided by `size`."""

    clip: float  # largest norm of one example's gradient
    noise: float  # multiplier
    size: float  # examples of a batch, on the mean: Poisson sampling draws more or fewer, or none
    secret: Secret  # of the noise


@dataclass(frozen=True, eq=False)
class Fit(Request[Fitted], Generic[Item]):
    """Training from `start`, one optimizer step per entry of `batches`."""

    start: State
    examples: Sequence[Item]
    batches: Sequence[Sequence[int]]  # the indices of a step's examples
    optimizer: Optimizer
    train: str = r".*"  # regular expression of the entries that are trained
    seed: int = 0  # of dropout and of augmentation
    augment: str | None = None  # of pictures, see `LocalConfig`
    mix: tuple[float, ...] | None = None  # the weight of each expert while it trains, where the gate is `mix`
    loss: Loss | Distillation | None = None  # None: the run's objective
    private: PerExample | None = None  # only of adapters

    @property
    def teachers(self) -> Sequence[State]:
        """Whom it distils from; often nobody."""
        return self.loss.teachers if isinstance(self.loss, Distillation) else ()

    def batch(self, step: int) -> Sequence[Item]:
        """What is trained on at a step. A pupil's pictures stay as they are: so its teachers answered to them."""
        chosen = [self.examples[index] for index in self.batches[step]]
        if self.augment is None or self.teachers:
            return chosen
        return augmented(chosen, self.augment, generator(self.seed, "augment", step))  # type: ignore[arg-type, return-value]


@dataclass(frozen=True, eq=False)
class FitHead(Request[State]):
    """A linear head (weight, bias) trained on the features that an image model has of the examples."""

    state: State  # of the model
    head: State  # where training starts
    examples: Sequence[Picture]
    batches: Sequence[Sequence[int]]  # the indices of a step's examples
    lr: float  # of Adam


@dataclass(frozen=True, eq=False)
class MeanLosses(Request[list[float]], Generic[Item]):
    """The mean loss per target of the examples under each state."""

    states: Sequence[State]
    examples: Sequence[Item]


@dataclass(frozen=True, eq=False)
class Gradient(Request[tuple[float, State]], Generic[Item]):
    """The mean loss of the examples and its gradient at `state`."""

    state: State
    examples: Sequence[Item]
    head: State | None = None  # of an image model: a linear head (weight, bias) instead of its own


@dataclass(frozen=True, eq=False)
class GradientMoments(Request[Evidence], Generic[Item]):
    """The moments of the gradients of the same examples at two states."""

    first: State
    second: State
    examples: Sequence[Item]
    sampled: bool = False  # whether the Fisher information takes labels drawn from the models
    seed: int = 0  # of those labels


@dataclass(frozen=True, eq=False)
class Features(Request[Tensor], Generic[Item]):
    """(N, H): what the base alone makes of each example: its last hidden state at the prompt's last token, or what an
    image model's head reads."""

    examples: Sequence[Item]


@dataclass(frozen=True, eq=False)
class Logits(Request[Tensor]):
    """(N, C): what an image model says of pictures."""

    state: State
    examples: Sequence[Picture]


@dataclass(frozen=True, eq=False)
class Answers(Request[Answer]):
    """What whole image models make of pictures, each on its own and together."""

    state: State
    examples: Sequence[Picture]


@dataclass(frozen=True, eq=False)
class LogLikelihoods(Request[list[tuple[float, ...]]], Generic[Item]):
    """Of each example and each of its texts, with an AnswerPair's two, the log-likelihood of all tokens that count."""

    state: State | None  # None: the base alone
    examples: Sequence[Item]  # AnswerPair or Judged
    mix: tuple[float, ...] | None = None  # the weight of each expert, where the gate is `mix`; None: by the prompts
    chunk: int | None = None  # of so many examples each, packed without regard to the others: the same bits in any list


@dataclass(frozen=True)
class Query:
    """One example to be answered in an evaluation."""

    prompt: list[int]  # token ids after the template
    answers: tuple[str, ...]  # references
    options: tuple[list[int], ...] = ()  # token ids of each option, for scoring without generation
    correct: tuple[int, ...] = ()  # which options are right
    example: Encoded | AnswerPair | Judged | None = None  # as training would see it; None where it is too long
    pair: AnswerPair | Judged | None = None  # what is preferred to what, whatever training sees; None where nothing is


@dataclass(frozen=True, eq=False)
class Generate(Request[list[str]]):
    """Greedy answers to prompts (token ids)."""

    state: State
    prompts: Sequence[list[int]]


@dataclass(frozen=True, eq=False)
class OptionScores(Request[list[list[float]]]):
    """Per query the log-likelihood of each of its options."""

    state: State
    queries: Sequence[Query]


@dataclass(frozen=True, eq=False)
class AnswerLoss(Request[float]):
    """The mean loss per target token of the queries with their first answers, as training would measure it."""

    state: State
    queries: Sequence[Query]


@dataclass(frozen=True)
class Work:
    """What a fit processed: real tokens (of pictures what they count as), tokens with padding, micro-batches, the token
    budget of each, how many of them were replayed (`engine/capture.py`) and had no padding (`engine/passes.py`),
    why others could not be, and which of the two were requested."""

    tokens: int = 0
    padded: int = 0
    micro_batches: int = 0
    budget: int = 0
    replayed: int = 0
    why: str = ""
    padding_free: int = 0
    requested: tuple[str, ...] = ()

    @property
    def padding(self) -> float:
        """The share of padding among all tokens processed."""
        return 1 - self.tokens / self.padded if self.padded else 0.0

    def passes(self) -> dict[str, int]:
        """How many micro-batches were replayed, ran as written, had no padding, as far as it was requested."""
        counts = dict[str, int]()
        if "captured" in self.requested:
            counts |= {"replayed": self.replayed, "as written": self.micro_batches - self.replayed}
        if "padding_free" in self.requested:
            counts |= {"without padding": self.padding_free, "padded": self.micro_batches - self.padding_free}
        return counts

    def plus(self, other: Work) -> Work:
        """Both together, with the budget of `other`, the later one."""
        return Work(
            self.tokens + other.tokens,
            self.padded + other.padded,
            self.micro_batches + other.micro_batches,
            other.budget,
            self.replayed + other.replayed,
            other.why or self.why,
            self.padding_free + other.padding_free,
            tuple(dict.fromkeys((*self.requested, *other.requested))),
        )


class Executor(Protocol):
    """Executes what sites await: see `engine.engine.Engine`."""

    def execute(self, requests: Sequence[Request[Result]]) -> Sequence[Result]:
        """One result, or one exception, for each of these requests of one type and structure. UserError: the engine
        does not answer requests of this type."""

    def take_work(self) -> Work:
        """The training work since the last call."""


class Runtime(Protocol):
    """Runs the coroutines of sites; see `runtime/`."""

    def run(self, work: Mapping[str, Coroutine[Request[Given], Given, Result]]) -> dict[str, Result | Exception]: ...

    def take_work(self) -> Work: ...


def succeeded(outcomes: Mapping[str, Result | Exception]) -> dict[str, Result]:
    """What `Runtime.run` returned, where all of it has to succeed. RunError: a client's work failed, the first one."""
    results = {}
    for id, outcome in outcomes.items():
        if isinstance(outcome, ClientError):
            raise RunError(str(outcome) if f"client {id}" in str(outcome) else f"{id}: {outcome}") from outcome
        if isinstance(outcome, Exception):
            raise outcome
        results[id] = outcome
    return results


def size_of(example: Any) -> int:
    """The tokens of an example or a query; 1 of whatever else is trained on."""
    if isinstance(example, Query):
        return len(example.prompt) + sum(map(len, example.options))
    if isinstance(example, AnswerPair | Judged):
        return sum(len(text.input_ids) for text in example.texts)
    return len(example.input_ids) if isinstance(example, Encoded) else 1


def augmented(pictures: Sequence[Picture], how: str, draws: torch.Generator) -> list[Picture]:
    """The pictures with other pixels; see `moved`. `how` is crop or crop-flip."""
    pixels = moved(pixels_of(pictures), draws, flip=how == "crop-flip")
    return [replace(picture, pixels=row) for picture, row in zip(pictures, pixels, strict=True)]


def moved(pixels: Tensor, draws: torch.Generator, *, flip: bool) -> Tensor:
    """The pictures (N, C, H, W), each shifted by up to an eighth of its sides, black where it is shifted in: a random
    crop of the picture with a black margin. With `flip` each is also mirrored, left to right, or not, at even chances.
    """
    count, channels, height, width = pixels.shape
    above, beside = height // 8, width // 8
    rows = torch.arange(height) + torch.randint(2 * above + 1, (count, 1), generator=draws)
    columns = torch.arange(width) + torch.randint(2 * beside + 1, (count, 1), generator=draws)
    if flip:
        mirrored = torch.rand(count, 1, generator=draws) < 0.5
        columns = torch.where(mirrored, columns.flip(1), columns)
    # A row and a column per picture cross to its device; the indices, made there, would be larger than the pictures.
    rows, columns = rows.to(pixels.device), columns.to(pixels.device)
    padded = nn.functional.pad(pixels, (beside, beside, above, above))
    # By index in the flat picture: indexing by row and column takes four times as long.
    indices = (rows[:, :, None] * padded.shape[-1] + columns[:, None, :]).flatten(1)
    return padded.flatten(2).gather(2, indices[:, None].expand(-1, channels, -1)).unflatten(2, (height, width))
