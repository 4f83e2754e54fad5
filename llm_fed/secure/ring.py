"""Vectors as whole numbers modulo 2^32, whose sum over a cohort cannot overflow."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_fed.secure.keys import add_streams

LEAST_BITS = 15  # of a number beside its sign, with the largest cohort
MOST_CLIENTS = (2**31 - 1) >> LEAST_BITS


@dataclass(frozen=True)
class Ring:
    """Fixed-point numbers from -`bound` to `bound` of so many clients: `levels` steps on each side of 0."""

    clients: int
    bound: float

    @property
    def levels(self) -> int:
        return (2**31 - 1) // self.clients

    @property
    def step(self) -> float:
        return self.bound / self.levels

    def encode(self, vector: Tensor, key: bytes) -> Tensor:
        """(P,) int32: each number rounded up or down at random, so that the mean is its own.

        Args:
            vector: (P,), none of whose numbers is beyond the bound.
            key: 32 bytes, from which the rounding is drawn.
        """
        draws = torch.zeros(len(vector), dtype=torch.int32)
        add_streams(draws, [(key, 1)])
        scaled = draws.double().add_(2.0**31).mul_(2.0**-32)  # in [0, 1)
        scaled.add_(vector.double(), alpha=1 / self.step).floor_()
        return scaled.clamp_(-self.levels, self.levels).to(torch.int32)

    def decode(self, total: Tensor) -> Tensor:
        """(P,) float64: the sum that such vectors add up to."""
        return total.double().mul_(self.step)
