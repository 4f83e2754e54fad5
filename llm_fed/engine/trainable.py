"""Trainable: a base as the engine asks it, and which methods answer which type of request: of the engine, and of the
kinds of model and data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from llm_fed.basics import signs
from llm_fed.engine.examples import Examples, Item
from llm_fed.engine.memory import budget_and_overhead, on_device
from llm_fed.method.requests import Request
from llm_fed.models.base import Base
from llm_fed.models.joined import Answer, full
from llm_fed.models.structure import Structure

Context = TypeVar("Context")


class Handler(NamedTuple):
    """The method that answers requests of a type."""

    method: Callable[..., Any]
    each: bool = False  # whether it is given one request after another, or all of one structure together


Answering = Mapping[tuple[type[Request[Any]], bool], Handler]


@dataclass(kw_only=True)
class Trainable(Base, ABC):
    """A base, and what of training and answering depends on its kind.

    Attributes:
        noun: what it is, for messages, such as "language model".
        answering: by type of request, and whether adapters are trained, what answers requests that the engine does not
            know; it is given the requests and the engine.
    """

    noun: ClassVar[str]
    answering: ClassVar[Answering] = {}

    @abstractmethod
    def examples(self, structure: Structure) -> Examples:
        """What the engine must know of the examples that sites with this structure train on."""

    def features(self, structure: Structure, examples: Sequence[Item]) -> Tensor:
        """(N, H): what the head reads of each example, on the CPU, without the adapters of `structure`."""
        return in_chunks(self, self.examples(structure), examples, lambda part: nullcontext()).features


@torch.inference_mode()
def in_chunks(
    base: Base, examples: Examples, items: Sequence[Item], within: Callable[[slice], AbstractContextManager[Context]]
) -> Answer:
    """The base's answer to all items, in float32 at least, on the CPU. `within`: the context for a part."""
    answers, longest = [], max(map(examples.length, items), default=1)
    size = max(1, budget_and_overhead(base.device)[0] // longest)
    for at in range(0, len(items), size):
        batch = on_device(examples.collate(items[at : at + size]), base.device)
        with within(slice(at, at + size)), base.computing():
            answers.append(examples.answer(base.model, batch))
        signs.listener.get().answered(len(items[at : at + size]))
    return Answer.joined(answers).map(Tensor.cpu).map(full)
