"""The local runtime: this process, CPU or one GPU. Starts the cohort's coroutines and executes their requests fused."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from llm_fed.engine.drive import drive
from llm_fed.engine.memory import free_memory
from llm_fed.method.requests import Executor, Request, Work
from llm_fed.state import State

# Row, gradient, start, and AdamW's two moments: five float32 copies of an adapter while its client trains.
_COPIES = 5


@dataclass
class LocalRuntime:
    """Runs sites' coroutines, up to `clients_per_pass` at a time."""

    engine: Executor
    clients_per_pass: int  # how many clients share a fused pass; it decides the packing, hence the bits of a result

    def run(self, work: Mapping[str, Coroutine[Request[Any], Any, Any]]) -> dict[str, Any]:
        """Each site's return value, or the exception that ended it, in the order given."""
        outcomes: dict[str, Any] = {}
        items = iter(work.items())
        try:
            while chunk := dict(islice(items, self.clients_per_pass)):
                outcomes.update(drive(chunk, self.engine.execute))
        finally:
            for coroutine in work.values():
                coroutine.close()  # Python warns of those that an error or Ctrl-C kept from starting
        return outcomes

    def take_work(self) -> Work:
        """The training work counted since the last call."""
        return self.engine.take_work()


def choose_clients_per_pass(requested: int | str, cohort: int, like: State, device: torch.device) -> int:
    """The number that is requested; `auto`: the whole cohort, as far as its adapters fill at most a quarter of free
    memory."""
    if requested != "auto":
        return int(requested)
    per_client = like.row.numel() * like.row.element_size() * _COPIES
    return max(1, min(cohort, free_memory(device) // 4 // max(1, per_client)))
