"""Trainable: a base as the engine asks it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from llm_fed.engine import classifying
from llm_fed.engine.answering import Answering
from llm_fed.engine.examples import Examples
from llm_fed.models.base import Base
from llm_fed.models.structure import Structure


@dataclass(kw_only=True)
class Trainable(Base, Answering, ABC):
    """A base, and what of training and answering depends on its kind.

    Its methods that are marked with `answers` are given the requests and the engine: a kind may answer requests that
    the engine does not know.

    Attributes:
        noun: what it is, for messages, such as "language model".
    """

    noun: ClassVar[str]

    @abstractmethod
    def examples(self, structure: Structure) -> Examples:
        """What the engine must know of the examples that sites with this structure train on."""

    def features(self, structure: Structure, examples: Sequence[Any]) -> Tensor:
        """(N, H): what the model without the adapters of `structure` makes of each example, on the CPU: what its head
        reads."""
        return classifying.in_chunks(self, self.examples(structure), examples, lambda part: nullcontext()).features
