"""Moments of the per-example gradients at two models, coordinate by coordinate, gathered chunk by chunk.

Shape letters: N examples, P parameters; 2 models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Means over N examples (POTARA, Eq. 54-56): all divide by N, all in float64."""

    count: int  # N
    mean: Tensor  # (2, P)
    variance: Tensor  # (2, P)
    covariance: Tensor  # (P,) between the two models

    @classmethod
    def of(cls, gradients: Tensor) -> Moments:
        """Of the gradients (2, N, P) of N >= 1 examples."""
        gradients = gradients.double()
        mean = gradients.mean(1)
        centred = gradients - mean[:, None]
        return cls(gradients.shape[1], mean, centred.square().mean(1), (centred[0] * centred[1]).mean(0))

    def __add__(self, other: Moments) -> Moments:
        """Of both groups of examples together (Chan, Golub and LeVeque 1983: no difference of large sums)."""
        count = self.count + other.count
        own_share, others_share = self.count / count, other.count / count
        both, apart = own_share * others_share, other.mean - self.mean
        return Moments(
            count,
            self.mean + others_share * apart,
            own_share * self.variance + others_share * other.variance + both * apart.square(),
            own_share * self.covariance + others_share * other.covariance + both * apart[0] * apart[1],
        )

    @property
    def fisher(self) -> Tensor:
        """The mean of the squared gradients (2, P): the diagonal Fisher information of Eq. 19."""
        return self.variance + self.mean.square()

    def to(self, device: torch.device | str) -> Moments:
        return Moments(self.count, self.mean.to(device), self.variance.to(device), self.covariance.to(device))


@dataclass(frozen=True)
class Evidence:
    """What a client's examples say about two models."""

    moments: Moments  # with the labels of the data
    fisher: Tensor  # (2, P), float64: `moments.fisher`, or with labels drawn from the models
    losses: tuple[float, float]  # mean loss per target token at each model, labels of the data
