"""The local runtime: this process, CPU or one GPU. It runs clients' `async` methods side by side, and hands work of the
same kind to one fused execution.

A client's coroutine runs until it awaits a `Request`; when every client of the pass waits, requests of one type and
structure are executed together and each client goes on with its own result. No event loop is involved, and the order is
fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch

from llm_fed.engine.memory import free_memory
from llm_fed.method.requests import Executor, Request, Result, Work
from llm_fed.state import State

Answer = TypeVar("Answer")

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


def drive(
    work: Mapping[str, Coroutine[Request[Answer], Answer | None, Result]],
    execute: Callable[[Sequence[Request[Answer]]], Sequence[Answer]],
) -> dict[str, Result | Exception]:
    """Run the coroutines to their ends.

    Args:
        work: coroutine by site, in the order that decides how requests are packed.
        execute: answers requests of one type and structure, in order; an exception instance as an answer is raised in
            that coroutine.

    Returns:
        Per site the coroutine's return value, or the exception that ended it: one client's failure ends that client
        alone.
    """
    outcomes: dict[str, Result | Exception] = {}
    waiting: dict[str, Request[Answer]] = {}
    answers: dict[str, Answer | None] = dict.fromkeys(work)
    while answers:
        for site, answer in answers.items():
            waiting.pop(site, None)
            try:
                waiting[site] = work[site].throw(answer) if isinstance(answer, Exception) else work[site].send(answer)
            except StopIteration as stop:
                outcomes[site] = stop.value
            except Exception as error:
                outcomes[site] = error
        groups: dict[Hashable, list[str]] = {}
        for site in work:
            if site in waiting:
                groups.setdefault((type(waiting[site]), waiting[site].structure), []).append(site)
        answers = {}
        for sites in groups.values():
            answers.update(zip(sites, execute([waiting[site] for site in sites]), strict=True))
    return {site: outcomes[site] for site in work}
