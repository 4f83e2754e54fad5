"""AdaptedModel: what every fused pass over a frozen base needs to know, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import TEXT, Examples
from llm_fed.engine.memory import Result, budget_and_overhead, within_memory
from llm_fed.models.frozen import device_of
from llm_fed.models.lora import Lora


@dataclass(frozen=True)
class AdaptedModel:
    """A frozen base under adapters of one structure.

    `model` is a causal language model or an image classifier, quantised or of any float dtype.
    """

    model: nn.Module
    structure: Lora
    examples: Examples = TEXT
    autocast: torch.dtype | None = None  # compute in this dtype; the adapters keep theirs
    budget: int | None = None  # most tokens of a micro-batch; None: as of `packing`
    packing: tuple[int, int] | None = None  # budget and overhead as measured (`calibration`); None: by device

    @property
    def device(self) -> torch.device:
        """Where the base's inputs are wanted."""
        return device_of(self.model)

    @property
    def overhead(self) -> int:
        """What one more micro-batch costs in tokens."""
        return (self.packing or budget_and_overhead(self.device))[1]

    @property
    def most_tokens(self) -> int:
        """Of a micro-batch."""
        return self.budget or (self.packing or budget_and_overhead(self.device))[0]

    def bank(self, num_rows: int, dtype: torch.dtype = torch.float32, train: str = r".*") -> AdapterBank:
        """So many adapters around the base, all zero, see `AdapterBank`."""
        return AdapterBank(self.model, self.structure, num_rows, dtype, train)

    def computing(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    def within_memory(self, run: Callable[[int], Result]) -> Result:
        """`run(budget)`, again with half the budget as long as the device's memory does not suffice.

        Raises:
            RunError: it does not suffice for one example.
        """
        return within_memory(run, self.most_tokens)
