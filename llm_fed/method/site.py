"""Site: one party's data, memory and awaitable work, which clients (`Client`) and the server (`Server`) have in
common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from llm_fed.basics.errors import ClientError, UserError
from llm_fed.basics.rng import derive, generator
from llm_fed.merge.moments import Evidence
from llm_fed.method import requests
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Distillation, Item, Loss, PerExample, Query
from llm_fed.models.joined import Answer
from llm_fed.models.structure import Structure
from llm_fed.settings.config import LocalConfig
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.state import Layout, State
from llm_fed.state.wire import Message
from llm_fed.tasks.common import Picture

# Key of `memory`, before the number of the fit: the model with which it ended its last round (`objective.reference`).
LAST = "reference"
CHUNK = 8  # examples of which the base is asked together


@dataclass(frozen=True)
class Data:
    """One site's examples, which never leave it."""

    train: Sequence[Any] = ()  # Encoded, AnswerPair, Judged or Picture
    held_out: Sequence[Any] = ()  # the validation examples, as training would see them
    queries: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # Query or Picture, by split: validation, test
    metric: str = ""  # by which queries are scored, see `scoring.evaluation.score_split`
    num_labels: int = 0  # of pictures
    foreign: bool = False  # at the server: of another domain than the clients'
    left_out: Mapping[str, int] = field(default_factory=dict)  # by split, examples that were too long
    # by split, the tokens of right answers that are longer than the model may answer
    cut: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ability: Sequence[Any] = ()  # Query: a fixed text, on which `eval.ability` is measured
    none_fits: tuple[str, ...] = ()  # a message for each split of which that was every example


@dataclass
class Site:
    """One party of the federation, as a method sees it.

    `memory` is private to the site. It survives rounds and is checkpointed, one row per key (`rows.Memory`). Its values
    must be messages (`wire.pack`); to change a value, assign it again.
    """

    id: str
    structure: Structure
    local: LocalConfig
    seed: int
    draw: Callable[[torch.Generator], State]  # a fresh state of `structure`
    data: Data = Data()
    rounds: int = 1  # of the whole run
    start: State | None = None  # where the run starts, instead of a fresh draw (`start.give`)
    objective: ObjectiveConfig = ObjectiveConfig()  # the loss
    memory: MutableMapping[str, Message] = field(default_factory=dict)
    round: int = 0
    lr: float = 0.0  # of this round
    losses: list[float] = field(default_factory=list)  # of this round's local steps, for the metrics
    fits: int = 0  # in this round: each draws its own batches and dropout
    most_steps: int | None = None  # of one fit; None: any number
    _layout: Layout | None = field(default=None, init=False, repr=False)  # of a whole state, once one was drawn
    # By index of a training example what the base makes of it.
    of_base: dict[int, tuple[float, ...]] = field(default_factory=dict, init=False, repr=False)

    @property
    def train(self) -> Sequence[Any]:
        """The training examples."""
        return self.data.train

    @property
    def num_examples(self) -> int:
        """n_i: the number of training examples."""
        return len(self.train)

    def begin(self, round: int, lr: float) -> None:
        """Called by the loop before the site's work in a round: random draws depend only on (seed, round, site)."""
        self.round, self.lr, self.losses, self.fits = round, lr, [], 0

    def initial(self, *labels: str | int) -> State:
        """A new state, the same at every site. Other `labels` give other draws, such as the models of a soup. If the
        site has a `start`, it is returned. UserError: the site has a `start`, but `labels` ask for another draw."""
        if self.start is not None and labels:
            raise UserError(
                "adapter.start gives all models the same start, but this method needs several models that differ; set "
                "adapter.start to null, or choose a method with one model"
            )
        state = self.draw(generator(self.seed, "initial", *labels)) if self.start is None else self.start
        self._layout = state.layout
        return state

    def assemble(self, message: State) -> State:
        """A whole state of this site: a new one, updated by the entries that the site kept, then by the message."""
        if message.layout == self._layout:
            return message
        state, own = self.initial(), self.memory.get("own")
        return (state if own is None else state.updated(own)).updated(message)

    def keep(self, state: State, trained: str, message: State) -> None:
        """Remember, for `assemble`, the entries of `state` that are trained here but not among those of `message`."""
        own = [name for name in state.layout.matching(trained) if name not in message.layout.slices]
        extras = {name: value for name, value in state.extras.items() if name not in message.extras}
        if own or extras:
            self.memory["own"] = state.pick(own, extras)

    @property
    def optimizer(self) -> Optimizer:
        """The run's optimizer, with this round's learning rate."""
        local = self.local
        return Optimizer(
            self.lr, local.optimizer, local.momentum, local.weight_decay, local.clip, local.proximal,
            frozen=local.freeze, decay=local.decay, warmup=local.warmup_steps,
        )  # fmt: skip

    async def fit(
        self,
        state: State,
        *,
        train: str = r".*",
        examples: Sequence[Item] | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        optimizer: Optimizer | None = None,
        loss: Loss | Distillation | None = None,
        structure: Structure | None = None,
        mix: tuple[float, ...] | None = None,
    ) -> State:
        """Train from `state` on this site's examples with the run's `local` settings. It is fused over the cohort.

        Args:
            state: the state from which training starts; it is not changed.
            train: a regular expression of the entries to train; the others stay as they are.
            examples: the examples to train on (default: all training examples).
            steps: the number of optimizer steps (default: `local.steps`, else `local.epochs` passes).
            epochs: passes over the examples, instead of steps.
            optimizer: the optimizer (default: `self.optimizer`); make a variant with `dataclasses.replace`.
            loss: a loss instead of the run's objective: `Distillation` from teachers, or a function. For adapters it
                takes logits (n, C), targets (n,) and columns, each of n numbers, and returns a loss (n,) for each
                target; `columns["example"]` is the place of a target's example, and the others are those of
                `task.columns.extra`. For whole image models it takes the `Answer` to a batch, its labels (N,) and the
                indices (N,) of its pictures in the examples, and returns the batch's loss.
            structure: the structure of `state` (default: the site's own).
            mix: the weight of each expert, if the structure's gate is `mix`.

        Raises:
            ClientError: there is no example, or the loss is not finite.
        """
        nth, self.fits = self.fits, self.fits + 1
        examples = self.train if examples is None else examples
        batches = self.indices(len(examples), steps, nth, epochs)
        private = self._noise(len(examples), len(batches), nth)
        its = structure or self.structure
        if self.objective.refers and loss is None:
            used = sorted({index for indices in batches for index in indices})
            examples = await self._against(examples, used, state, its, mix, nth)
            new = {index: number for number, index in enumerate(used)}
            batches = [[new[index] for index in indices] for indices in batches]
        fitted = await requests.Fit(
            self.id,
            its,
            start=state,
            examples=examples,
            batches=batches,
            optimizer=optimizer or self.optimizer,
            train=train,
            seed=derive(self.seed, "dropout", self.round, self.id, nth),
            augment=self.local.augment,
            mix=mix,
            loss=loss,
            private=private,
        )
        if self.objective.reference == "last" and loss is None and not self._finishes:
            self.memory[f"{LAST} {nth}"] = fitted.state
        self.losses.extend(fitted.losses)
        return fitted.state

    def batches(self, *, epochs: int) -> list[list[Any]]:
        """The training examples of each optimizer step of `epochs` epochs, in the order in which `fit` takes them."""
        return [[self.train[i] for i in chosen] for chosen in self.indices(len(self.train), epochs=epochs)]

    def indices(self, count: int, steps: int | None = None, nth: int = 0, epochs: int | None = None) -> list[list[int]]:
        """Which of `count` examples each optimizer step takes: shuffled epochs cut into batches, depending only on
        (seed, round, site, nth). ClientError: there is no example."""
        size, total = self._steps(count, steps, epochs)
        draws = generator(self.seed, "batches", self.round, self.id, nth)
        chosen: list[list[int]] = []
        while len(chosen) < total:
            order = torch.randperm(count, generator=draws).tolist()
            chosen += [order[at : at + size] for at in range(0, count, size)]
        return chosen[:total]

    @property
    def planned(self) -> tuple[int, int]:
        """(examples of a batch, steps) of a fit with the run's settings; ClientError: there is no example."""
        return self._steps(self.num_examples, None, None)

    def _steps(self, count: int, steps: int | None, epochs: int | None) -> tuple[int, int]:
        """(examples of a batch, steps) of a fit on `count` examples. ClientError: none, or over `most_steps`."""
        if not count:
            raise ClientError(f"client {self.id} has no training example")
        size = min(self.local.batch_size, count)
        if steps is None and epochs is None:
            steps = self.local.steps_on(count)
        total = (epochs or 0) * -(-count // size) if steps is None else steps
        if self.most_steps is not None and total > self.most_steps:
            raise ClientError(f"a fit of client {self.id} has {total:,} steps, and at most {self.most_steps:,} may be")
        return size, total

    @property
    def _finishes(self) -> bool:
        """Whether this is `Method.finish`, after the last round."""
        return self.round > self.rounds

    def _noise(self, count: int, steps: int, nth: int) -> PerExample | None:
        """The noise of a fit on so many examples; None where nothing is hidden."""
        return None

    def _look(self, verb: str) -> None:
        """Called before training examples are used for anything but the steps of a fit."""

    async def _against_base(self, examples: Sequence[Item]) -> Sequence[Item]:
        """The examples with the log-likelihoods that the frozen base gives them, which DPO, IPO and KTO compare the
        model's with; as they are where nothing is compared with a reference."""
        if not self.objective.refers or not examples:
            return examples
        return compared(examples, await self.log_likelihoods(None, examples))

    async def _against(
        self, examples: Sequence[Item], used: Sequence[int], state: State, structure: Structure,
        mix: tuple[float, ...] | None, nth: int,
    ) -> list[Item]:  # fmt: skip
        """Those of the examples that the nth fit, from `state`, uses, with what `objective.reference` makes of them."""
        chosen = [examples[index] for index in used]
        if not chosen:
            return chosen
        if self.objective.reference == "base":
            known = await self._of_base(examples, used)
        else:
            last = self.memory.get(f"{LAST} {nth}") if self.objective.reference == "last" else None
            model = last if last is not None and last.layout == state.layout else state
            known = await requests.LogLikelihoods(self.id, structure, model, chosen, mix)
        return compared(chosen, known)

    async def _of_base(self, examples: Sequence[Item], used: Sequence[int]) -> list[tuple[float, ...]]:
        """Found once for each training example, in chunks of neighbours: the numbers then depend on the data alone, and
        not on which examples were requested first, so that a run that continues computes the same bits."""
        known = self.of_base if examples is self.train else {}
        chunks = sorted({index // CHUNK for index in used if index not in known})
        indices = [index for chunk in chunks for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, len(examples)))]
        if indices:
            requested = [examples[index] for index in indices]
            found = await requests.LogLikelihoods(self.id, self.structure, None, requested, chunk=CHUNK)
            known.update(zip(indices, found, strict=True))
        return [known[index] for index in used]

    async def losses_of(self, states: Sequence[State], examples: Sequence[Item] | None = None) -> list[float]:
        """The mean loss of the examples (default: all training examples) under each state, per target token, picture or
        preference. Preferences are compared with the base, whatever `objective.reference`: so are they everywhere but
        in `fit`."""
        self._look("losses_of")
        chosen = await self._against_base(self.train if examples is None else examples)
        return await requests.MeanLosses(self.id, self.structure, states, chosen)

    async def loss_of_answers(self, state: State, queries: Sequence[Query]) -> float | None:
        """The mean loss per target token of the queries' right answers under `state`, as training measures it. None if
        training would skip all of them."""
        known = [query for query in queries if query.example is not None]
        if self.objective.refers:
            examples = await self._against_base([query.example for query in known])
            known = [replace(query, example=own) for query, own in zip(known, examples, strict=True)]
        return await requests.AnswerLoss(self.id, self.structure, state, known) if known else None

    async def log_likelihoods(self, state: State | None, examples: Sequence[Item]) -> list[tuple[float, ...]]:
        """Of each pair, and of each of its two answers, the log-likelihood of all its tokens under `state`, or (None)
        under the base alone."""
        return await requests.LogLikelihoods(self.id, self.structure, state, list(examples))

    def sample(self, count: int, *, held_out: bool = False) -> list[Any]:
        """Up to `count` of the training or held-out examples at random, depending only on (seed, site). UserError:
        there are none."""
        source = self.data.held_out if held_out else self.train
        if not source:
            what = "held-out example; set task.validation above 0" if held_out else "training example"
            raise UserError(f"client {self.id} has no {what}")
        order = torch.randperm(len(source), generator=generator(self.seed, "sample", self.id)).tolist()
        return [source[i] for i in order[:count]]

    async def gradient_moments(
        self,
        first: State,
        second: State,
        examples: Sequence[Item],
        *,
        sampled: bool = False,
        structure: Structure | None = None,
    ) -> Evidence:
        """Moments of the per-example gradients of the log-likelihood at two states, on the same examples.

        Args:
            sampled: for the Fisher information, sample the label of each target (a token, or a picture) from the
                model's prediction; tokens under teacher forcing, so the preceding tokens are the example's.
            structure: the structure of the states (default: the site's own).

        Raises:
            ClientError: there is no target token, or a gradient is not finite.
        """
        self._look("gradient_moments")
        seed, examples = derive(self.seed, "labels", self.id), await self._against_base(examples)
        its = structure or self.structure
        return await requests.GradientMoments(self.id, its, first, second, examples, sampled, seed)

    async def features(self, examples: Sequence[Item]) -> torch.Tensor:
        """The features (len(examples), H) that the base without an adapter computes: the last hidden state at the last
        token of the prompt, or, for an image model, the input of its head."""
        self._look("features")
        return await requests.Features(self.id, self.structure, examples)

    async def gradient(
        self, state: State, examples: Sequence[Item], *, head: State | None = None
    ) -> tuple[float, State]:
        """The mean loss of the examples at `state`, and its gradient there.

        Args:
            head: for an image model, a linear head (weight, bias) that replaces its own, whose gradient is then zero.
        """
        self._look("gradient")
        examples = await self._against_base(examples)
        return await requests.Gradient(self.id, self.structure, state, examples, head)

    async def logits(self, state: State, pictures: Sequence[Picture]) -> torch.Tensor:
        """The logits (N, C) of an image model for N pictures and C labels."""
        return await requests.Logits(self.id, self.structure, state, pictures)

    async def answers(self, state: State, pictures: Sequence[Picture]) -> Answer:
        """The outputs of whole image models for N pictures, of each model alone and of all together."""
        return await requests.Answers(self.id, self.structure, state, pictures)

    def new_head(self, state: State) -> State:
        """A new linear head for the labels of this site's pictures, to replace the one in an image model's `state`:
        zero entries weight (C, H) and bias (C,)."""
        features = state.layout.shape_of[f"{state.layout.head}.weight"][1]
        weight = state.row.new_zeros(self.data.num_labels, features)
        return State.of({"weight": weight, "bias": weight.new_zeros(self.data.num_labels)})

    async def fit_head(self, state: State, head: State, *, epochs: int, lr: float) -> State:
        """Train a linear head with Adam on the features that an image model `state` has of this site's pictures."""
        self._look("fit_head")
        nth, self.fits = self.fits, self.fits + 1
        batches = self.indices(len(self.train), nth=nth, epochs=epochs)
        return await requests.FitHead(self.id, self.structure, state, head, self.train, batches, lr)

    async def generate(self, state: State, prompts: Sequence[list[int]]) -> list[str]:
        """Greedy answers to the prompts (token ids) under `state`. One batch may hold several clients' prompts."""
        return await requests.Generate(self.id, self.structure, state, prompts)

    async def option_scores(self, state: State, queries: Sequence[Query]) -> list[list[float]]:
        """For each query, the log-likelihood of each of its options under `state`. Nothing is generated."""
        return await requests.OptionScores(self.id, self.structure, state, queries)


def compared(examples: Sequence[Item], reference: Sequence[tuple[float, ...]]) -> list[Item]:
    """Preferences with what a reference makes of each."""
    return [replace(example, reference=own) for example, own in zip(examples, reference, strict=True)]  # type: ignore[type-var]
