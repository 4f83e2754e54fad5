"""AdaptedModel: what every fused pass over a frozen base needs to know, in one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import TEXT, Examples
from llm_fed.engine.memory import budget_and_overhead, within_memory
from llm_fed.models.base import device_of
from llm_fed.models.lora import Lora
from llm_fed.state import State

if TYPE_CHECKING:
    from llm_fed.engine.capture import Captures

Result = TypeVar("Result")


@dataclass(frozen=True)
class AdaptedModel:
    """A frozen base under adapters of one structure.

    `model` is a causal language model or an image classifier, quantised or of any float dtype.
    """

    model: nn.Module
    structure: Lora
    examples: Examples = TEXT
    autocast: torch.dtype | None = None  # compute in this dtype; the adapters keep theirs
    budget: int | None = None  # most tokens of a micro-batch; None: by device
    captures: Captures | None = None  # of training passes; None: they run as they are written
    padding_free: bool = False  # whether training lays texts end to end, where it can, and not in rows with padding
    fuses: bool = False  # whether training passes compute elementwise work `fused`

    @property
    def device(self) -> torch.device:
        """Where the base's inputs are wanted."""
        return device_of(self.model)

    @property
    def overhead(self) -> int:
        """What one more micro-batch costs in tokens."""
        return budget_and_overhead(self.device)[1]

    @property
    def most_tokens(self) -> int:
        """Of a micro-batch."""
        return self.budget or budget_and_overhead(self.device)[0]

    def bank(self, num_rows: int, dtype: torch.dtype = torch.float32, train: str = r".*") -> AdapterBank:
        """So many adapters around the base, all zero, see `AdapterBank`."""
        return AdapterBank(self.model, self.structure, num_rows, dtype, train)

    def bank_of(self, states: Sequence[State]) -> AdapterBank:
        """One row for each of these states."""
        bank = self.bank(len(states), states[0].row.dtype)
        for row, state in enumerate(states):
            bank.load(row, state)
        return bank

    def computing(self) -> torch.autocast:
        """The context of a forward pass. A graph must make its own casts, as a cache does not outlive the pass."""
        cached = None if self.captures is None else False
        return torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=cached
        )  # fmt: skip

    def within_memory(self, run: Callable[[AdaptedModel], Result]) -> Result:
        """What `run` makes of this model, with as large a budget as memory allows."""
        free = self.captures.clear if self.captures else lambda: None
        return within_memory(lambda budget: run(replace(self, budget=budget)), self.most_tokens, free)
