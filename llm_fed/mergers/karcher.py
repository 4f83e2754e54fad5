"""Riemannian Center of Mass and Mollifier Smoothing (Karcher 1977): the mean of directions on a sphere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_fed.merge.products import combined
from llm_fed.state import State

STEPS, NEAR = 100, 1e-10  # gradient steps, of which a dozen are enough unless two point in opposite directions


def karcher(states: Sequence[State], weights: Sequence[float]) -> tuple[State, float]:
    """The mean of any number of adapters on the sphere, layer by layer, exactly."""
    return combined(states, lambda products: coefficients(products, weights)), 0.0


def coefficients(products: Tensor, weights: Sequence[float]) -> list[float]:
    """The coefficients of K layer updates whose sum points where the mean of their directions on the unit sphere does,
    and has the mean of their lengths. `products`: (K, K), their inner products. `weights`: K positive numbers, which
    need not sum to 1. An update that is zero has no direction, and none counts."""
    lengths = products.diagonal().clamp(min=0).sqrt()
    share = torch.tensor(weights, dtype=torch.float64)
    directed = torch.where(lengths > 0, share, 0.0)
    unit = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines = products * unit[:, None] * unit
    mean = directed.clone()  # coefficients of the unit vectors
    for _ in range(STEPS):
        length = float((mean @ cosines @ mean).clamp(min=0).sqrt())
        if length < NEAR:
            return [0.0] * len(weights)  # nothing but zeros, or opposite directions of one weight
        mean = mean / length
        towards = (cosines @ mean).clamp(-1, 1)
        angles = towards.acos()
        pull = directed / directed.sum() * torch.where(angles > 1e-6, angles / angles.sin().clamp(min=1e-12), 1.0)
        tangent = pull - (pull @ towards) * mean
        turn = float((tangent @ cosines @ tangent).clamp(min=0).sqrt())
        if turn < NEAR:
            break
        mean = torch.tensor(turn).cos() * mean + torch.tensor(turn).sin() / turn * tangent
    return [float(each) for each in (share / share.sum() @ lengths) * mean * unit]
