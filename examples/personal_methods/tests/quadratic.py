"""Clients whose loss is a formula: what they await is answered in closed form, by plain steps of gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import torch

from llm_fed.method import Client, Server, State, Upload
from llm_fed.method.requests import Fit, Fitted, Gradient
from llm_fed.method.site import Data
from llm_fed.settings.config import LocalConfig


def state(**entries: float) -> State:
    """A layer with one number for each of these."""
    return State.of({f"{name}.weight": torch.tensor([value], dtype=torch.float64) for name, value in entries.items()})


def numbers(state: State) -> dict[str, float]:
    """What `state` was made of."""
    return {name.removesuffix(".weight"): float(state[name]) for name in state}


def site(id: str, examples: int = 1, **local: Any) -> Any:
    """A client, or the server, that starts at zero; one step of SGD with rate 1/2, unless `local` says otherwise."""
    settings = LocalConfig(**{"steps": 1, "batch_size": 1, "optimizer": "sgd", **local})
    kind = Server if id == "server" else Client
    made = kind(id, None, settings, 0, lambda draws: state(body=0.0, head=0.0), Data(list(range(examples))))  # type: ignore[arg-type]
    made.begin(1, 0.5)
    return made


@dataclass
class Loss:
    """Of one client: its gradient, by the numbers of a state, and its value."""

    gradient: Callable[..., dict[str, float]]
    value: Callable[..., float] = lambda **entries: 0.0
    asked: list[Any] = field(default_factory=list)  # the requests, in their order

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """What the coroutine returns."""
        answer = None
        while True:
            try:
                self.asked.append(work.send(answer))
            except StopIteration as stop:
                return stop.value
            answer = self._fit(self.asked[-1]) if isinstance(self.asked[-1], Fit) else self._gradient(self.asked[-1])

    def _at(self, here: State) -> State:
        return state(**self.gradient(**numbers(here)))

    def _gradient(self, asked: Gradient) -> tuple[float, State]:
        return self.value(**numbers(asked.state)), self._at(asked.state)

    def _fit(self, job: Fit) -> Fitted:
        theta = job.start
        for _ in job.batches:
            gradient = self._at(theta)
            if job.optimizer.proximal:
                gradient = gradient + 2 * job.optimizer.proximal * (theta - job.optimizer.anchor)
            moved = theta - job.optimizer.lr * gradient
            theta = theta.updated(moved.select(job.train))
        return Fitted(theta, (0.0,) * len(job.batches))


def serve(method: Any, server: Server, held: Any, **uploads: tuple[State, int]) -> Any:
    """The server's state after these uploads, each with its client's number of examples."""
    came = [Upload(client, count, 0, content) for client, (content, count) in uploads.items()]
    return Loss(lambda: {}).run(method.server_update(server, held, came))
