"""Kind: a base with all that depends on what kind of model and data it is. One class for each kind; a run's base is an
instance of it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, Protocol, Self

import numpy as np
from torch import Tensor, nn

from llm_fed import tasks
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import UserError
from llm_fed.basics.rng import derive
from llm_fed.engine.capture import Captures
from llm_fed.engine.engine import Engine
from llm_fed.engine.examples import Examples
from llm_fed.engine.trainable import Trainable
from llm_fed.kinds.wording import Wording
from llm_fed.method.requests import Logits, Query
from llm_fed.method.site import Data
from llm_fed.models.base import Base
from llm_fed.models.joined import Answer, full
from llm_fed.models.prompt import Prompt
from llm_fed.models.structure import Structure
from llm_fed.settings.config import BaseConfig, Config, EvalConfig
from llm_fed.state import State
from llm_fed.tasks import common
from llm_fed.tasks.common import ClientData, Example, Item, Picture, TaskData, Template, text_of
from llm_fed.tasks.templates import Prompt as PromptText
from llm_fed.tasks.templates import as_turns

Note = Callable[[str], None]


class Encoding(Protocol):
    """Makes what sites train and are scored on of the examples of a task."""

    def data(self, id: str, given: ClientData, data: Data) -> Data:
        """`data` with a site's examples; to be called for the clients in their order, and then for the server."""

    def note(self) -> str:
        """What was left out or not read as it stands, in words; empty where nothing was."""


@dataclass(kw_only=True)
class Kind(Trainable):
    """What a run asks of its base. A kind of your own derives from it, and a configuration names it as `base.kind`."""

    # What metrics may read of its predictions: texts, options, labels or loss (`scoring.scores.Metric`).
    reads: ClassVar[tuple[str, ...]] = ("labels",)
    whole: ClassVar[bool] = False  # whether it can be trained whole, without adapters
    augments: ClassVar[bool] = False  # whether training examples can be shifted and mirrored (`local.augment`)
    # Whether the base answers before anything is trained, so that it can be scored; with a new head it cannot.
    knows: ClassVar[bool] = False
    # Settings of `task` that count beside those that all kinds read.
    uses: ClassVar[tuple[str, ...]] = ("template", "loss_on", "max_length", "too_long", "bad_rows")
    before_data: ClassVar[bool] = False  # whether it can be loaded before the task's data are read

    captures: Captures | None = None  # of a base that several runs share: the graphs of their training passes

    @classmethod
    @abstractmethod
    def load(cls, config: Config, task: TaskData | None, device: str) -> Self:
        """The base that the configuration names. `task`: with the names of the labels; its clients may be absent. None
        only where `before_data`. UserError: there is no such base, or a setting is not for it."""

    @classmethod
    def notes(cls, config: Config, task: TaskData) -> list[str]:
        """What the user should know of these settings."""
        return []

    @classmethod
    def readable(cls, task: TaskData) -> tuple[str, ...]:
        """What metrics may read of predictions for a task; some of `reads`."""
        return cls.reads

    @classmethod
    def known_labels(cls, config: Config) -> tuple[str, ...]:
        """The labels as far as they are known without the clients' data, as at the server of a network."""
        return tasks.labels_of(config.task) or ()

    @classmethod
    def check_network(cls, config: Config) -> None:
        """Refuse what this kind cannot do over a network. UserError: what, and what to set."""
        if "labels" in cls.reads and not cls.known_labels(config):
            raise UserError(
                f"task.name={config.task.name}: over a network no machine sees all labels, so task.labels must name "
                "them, e.g. task.labels=[negative,positive]"
            )

    @classmethod
    def hint(cls, config: BaseConfig, device: str) -> str:
        """A line on a quicker dtype; may be empty."""
        return ""

    @classmethod
    def saves(cls, config: BaseConfig) -> list[str]:
        """Settings with which training would need less memory, the least harmful first."""
        of_texts = "max_length" in cls.uses
        again = ["base.activation_checkpointing=true"] * (of_texts and not config.activation_checkpointing)
        halved = ["base.dtype=bfloat16"] * (config.dtype == "float32" and config.quantization is None)
        quantised = ["base.quantization=nf4"] * ("texts" in cls.reads and config.quantization is None)
        return [*again, *halved, *quantised, f"a smaller {'task.max_length' if of_texts else 'local.batch_size'}"]

    @property
    def identity(self) -> tuple[object, ...]:
        """What, beside the weights, all machines of a federation must have in common."""
        return (self.labels,) if self.labels else ()

    def configured(self, config: Config) -> Self:
        """The base as a configuration puts prompts to it."""
        return self

    def as_said(
        self, config: Config, prompt: Callable[[], Prompt | None], keys: Collection[str]
    ) -> tuple[Self, Config, Prompt | None]:
        """Base and configuration that put prompts as an adapter's folder says, and what it says. `prompt`: reads that;
        it is not asked where there are no prompts. `keys`: the settings that were given explicitly, which count more.
        """
        return self, config, None

    def engine(self, evaluation: EvalConfig | None = None) -> Engine:
        """What answers the requests of sites."""
        return Engine(self, evaluation or EvalConfig())

    # Data

    def encoding(self, config: Config, task: TaskData, reads: str, note: Note) -> Encoding:
        """Of the examples of a task, of whose predictions the metric `reads` something. `note` is told what the user
        should know at once."""
        return AsTheyAre(config, self.encode)

    def encode(self, examples: Sequence[Any]) -> Sequence[Any]:
        """A task's examples as they are trained and scored on: with a `label` where metrics read labels."""
        return examples

    # Use and export of personal models

    @abstractmethod
    def wording(self, structure: Structure) -> Wording:
        """What a card says of a personal model."""

    def settings(self, structure: Structure) -> Mapping[str, Mapping[str, Any]]:
        """The JSON files beside the weights of a whole model, by name."""
        raise NotImplementedError(f"a {self.noun} is not trained whole")

    def beside_adapters(self, prompt: Prompt | None) -> Mapping[str, bytes]:
        """Further files in the folder of an adapter, by name."""
        return {}

    def prompt_of(self, config: Config) -> Prompt | None:
        """How a configuration puts prompts to the base; None where it takes none."""
        return None

    def tokens(self, prompts: Sequence[PromptText], template: str | Template | None) -> list[list[int]]:
        """The token ids of prompts. UserError: it takes none."""
        self._cannot("give it what it classifies with `classify`" if self.labels else "it writes no texts")

    def classify(self, structure: Structure, state: State, given: Any) -> Tensor:
        """The numbers (N,) of the labels of what a user gives, see `classified`, or the numbers that are predicted."""
        (logits,) = self.engine().execute([Logits("", structure, state, self.classified(given))])
        return self.read_off(logits)

    def read_off(self, logits: Tensor) -> Tensor:
        """(N,): the prediction that logits (N, C) stand for."""
        return logits.argmax(-1)

    def classified(self, given: Any) -> Sequence[Any]:
        """What a user gives to be classified, as examples of this kind. UserError: it classifies nothing."""
        self._cannot("give it prompts with `generate`")

    def _cannot(self, remedy: str) -> NoReturn:
        raise UserError(f"this is {'an' if self.noun[0] in 'aeiou' else 'a'} {self.noun}; {remedy}")


class AsTheyAre:
    """The encoding of examples that all fit: each split as `encode` makes it."""

    def __init__(self, config: Config, encode: Callable[[Sequence[Any]], Sequence[Any]]):
        self._config, self._encode = config, encode

    def data(self, id: str, given: ClientData, data: Data) -> Data:
        validation, test = self._encode(given.validation), self._encode(given.test)
        queries = {
            "validation": in_scored_order(validation, given.validation, "validation", self._config),
            "test": in_scored_order(test, given.test, "test", self._config),
        }
        return replace(data, train=self._encode(given.train), held_out=validation, queries=queries)

    def note(self) -> str:
        return ""


def in_scored_order(
    items: Sequence[Item], examples: Sequence[Example | Picture], split: str, config: Config
) -> Sequence[Item]:
    """What belongs to a split's examples, in the order of which `eval.limit` keeps the first, a draw of
    `seeds.evaluation`. An example that is added does not change the order of the others."""
    seed = config.seeds.evaluation
    if config.eval.limit is None or seed is None:
        return items
    drawn = common.drawn(common.digests(examples), derive(seed, "evaluation", split))
    return [items[index] for index in np.argsort(drawn)]


@dataclass(frozen=True, kw_only=True)
class Labelled(Examples):
    """Examples with one label each, of a classifier."""

    single: ClassVar[bool] = True

    head: State | None = None  # weight (C, H) and bias (C,) instead of the model's own head

    def num_targets(self, examples: Sized) -> int:
        return len(examples)

    @abstractmethod
    def answer(self, model: nn.Module, batch: Any) -> Answer:
        """Logits, and what the head reads."""

    def under_head(self, head: State) -> Self:
        return replace(self, head=head)

    def logits(self, model: Any, batch: Any, *, all_rows: bool = False) -> Tensor:
        """(N, C); all rows always go through the head."""
        answer = self.answer(model, batch)
        if self.head is None:
            return full(answer.logits)
        weight, bias = (tensor.to(answer.features) for tensor in self.head.tensors().values())
        return full(nn.functional.linear(answer.features, weight, bias))


class Shown:
    """Shows predictions of a language model."""

    def __init__(self, base: Base):
        self._tokenizer = base.tokenizer

    def line(self, query: Query, alone: Any, own: Any, example: Example | None) -> dict[str, Json]:
        """A line of `samples.jsonl` about a query, without its client. `alone`, `own`: the predictions of the base and
        of the personal model. `example`: from which the query was made, where that is known."""
        prompt = str(self._tokenizer.decode(query.prompt, skip_special_tokens=True))
        return {
            "prompt": prompt,
            **(self._parts(example, prompt) if example else {}),
            "references": list(query.answers),
            "base": self._text(query, alone),
            "answer": self._text(query, own),
        }

    def _parts(self, example: Example, prompt: str) -> dict[str, str]:
        """The prompt as the data have it (`text`), its system text, if it has one (`system`), and what the template
        puts around both (`template`); nothing where they are not in the prompt."""
        turns = as_turns(example.prompt)
        system = "\n".join(turn.content for turn in turns if turn.role == "system").strip()
        spoken = [turn for turn in turns if turn.role != "system"]
        behind = prompt.find(system) + len(system)
        last = spoken[-1].content.strip()
        start, end = prompt.find(spoken[0].content.strip(), behind), prompt.rfind(last) + len(last)
        if system not in prompt or not behind <= start <= end:
            return {}
        before = prompt[:start].replace(system, "{system}") if system else prompt[:start]
        text = spoken[0].content if len(spoken) == 1 else text_of(spoken)
        template = {"text": text, "template": f"{before}{{prompt}}{prompt[end:]}"}
        return template | ({"system": system} if system else {})

    def _text(self, query: Query, prediction: str | Sequence[float]) -> str:
        """A prediction as text: of log-likelihoods the option that has the highest, and of equal ones the first."""
        if isinstance(prediction, str):
            return prediction
        best = max(range(len(prediction)), key=lambda option: prediction[option])
        return str(self._tokenizer.decode(query.options[best], skip_special_tokens=True)).strip()
