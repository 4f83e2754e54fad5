"""FedALA: Adaptive Local Aggregation for Personalized Federated Learning (Zhang, Hua, Wang, Song, Xue, Ma, Guan; AAAI
2023), Algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from statistics import pstdev
from typing import Annotated, ClassVar

import torch

from llm_fed.method import Client, Message, Method, Site, State
from llm_fed.settings import Above, AtMost, PositiveFloat, PositiveInt
from personal_methods.layers import last_layers

_LOSSES = 10  # the first weights are learned until the losses of so many passes differ little


@dataclass(frozen=True)
class FedALA(Method):
    """FedAvg whose clients start each round between their own last model and the server's: in the last layers
    theta_i + (theta - theta_i) W_i, with a weight for each number, learned on a part of their examples; below them at
    the server's.

    Deviation: `first_epochs` bounds the passes of the first learning, which the authors' code repeats until the losses
    of ten passes have a standard deviation below `tolerance`, perhaps for ever.
    """

    paper: ClassVar[str] = "FedALA (Zhang et al. 2023)"
    robust: ClassVar[bool] = True
    looks: ClassVar[bool] = True  # it asks for gradients

    adaptive_layers: PositiveInt = 1  # p: so many last layers have weights
    share: Annotated[float, Above(0), AtMost(1)] = 0.8  # s: of a client's examples, on which weights are learned
    weight_lr: PositiveFloat = 1.0  # eta
    tolerance: PositiveFloat = 0.1
    first_epochs: PositiveInt = 50

    async def client_update(self, client: Client, message: Message) -> Message:
        own = client.memory.get("model")
        start = message if own is None else await self._start(client, own, message)
        client.memory["model"] = theta = await client.fit(start)
        return theta - message

    async def personalize(self, client: Site, message: Message) -> Message:
        return client.memory.get("model", message)

    async def _start(self, client: Client, own: State, message: State) -> State:
        """The client's start; its weights are learned before."""
        layout = message.layout
        places = layout.joined(layout.matching(last_layers(message, self.adaptive_layers)))
        gap = _at(message, places) - _at(own, places)
        first = "weights" not in client.memory
        weights = torch.ones_like(gap) if first else client.memory["weights"]

        def between() -> State:
            row = message.row.clone()
            for place, part in zip(places, torch.split(weights * gap, [p.stop - p.start for p in places]), strict=True):
                row[place] = own.row[place] + part
            return message.like(row)

        losses: list[float] = []
        batches = client.batches(epochs=1)
        for _ in range(self.first_epochs if first else 1):
            for batch in batches[: ceil(self.share * len(batches))]:
                loss, gradient = await client.gradient(between(), batch)
                weights = (weights - self.weight_lr * _at(gradient, places) * gap).clamp(0, 1)
            losses.append(loss)
            if len(losses) > _LOSSES and pstdev(losses[-_LOSSES:]) < self.tolerance:
                break
        client.memory["weights"] = weights
        return between()


def _at(state: State, places: list[slice]) -> torch.Tensor:
    return torch.cat([state.row[place] for place in places])
