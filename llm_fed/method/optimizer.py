"""Optimizer: how the steps of one fit change its entries. A fit carries its own, so that a method may choose it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypedDict

import torch
from torch import nn

from llm_fed.basics.errors import UserError, lookup
from llm_fed.state import State

# Fused and foreach: one operation on the rows of all clients (docs/results/log/performance.md);
# torch takes them only when asked.
_KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": partial(torch.optim.SGD, foreach=True),
}


class Group(TypedDict):
    """Parameters that share a learning rate, as torch's optimizers are given them."""

    params: list[nn.Parameter]
    lr: float


@dataclass(frozen=True)
class Tail:
    """The penalty `strength * sum over layers of ||B[:, first:]|| ||A[first:]||`, in Frobenius norms, which makes the
    last components of an adapter small (HetLoRA, Cho et al. 2024)."""

    strength: float  # lambda
    first: int  # how many components it leaves alone


@dataclass(frozen=True)
class Optimizer:
    """One client's optimizer. A step's gradient is that of the loss, of the proximal term and of `tail`; then it is
    clipped, and then `correction` is added. Two are equal if all but their `anchor` and `correction` is. UserError: a
    number out of range, or momentum without sgd."""

    lr: float
    name: str = "adamw"  # adamw | adam | sgd
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0  # decoupled for adamw, part of the gradient for adam and sgd
    clip: float | None = None  # largest gradient norm
    proximal: float = 0.0  # lambda of lambda * ||theta - anchor||^2
    anchor: State | None = field(default=None, compare=False)  # None: where training starts
    correction: State | None = field(default=None, compare=False)  # what is added to the gradient of every step
    lr_of: Mapping[str, float] = field(default_factory=dict)  # another lr, by regular expression of entries
    decay: str = "constant"  # constant | linear | cosine: of the rates over the steps of the fit, down to zero
    warmup: int = 0  # steps before that in which they rise
    tail: Tail | None = None  # of adapters
    frozen: str | None = None  # regular expression of entries that stay as they are, whatever a method trains

    def __post_init__(self) -> None:
        for key in ("lr", "momentum", "weight_decay", "proximal"):
            value = vars(self)[key]
            if not 0 <= value < math.inf or (value and key == "momentum" and self.name != "sgd"):
                rule = "these numbers are at least 0 and finite, and momentum is for sgd"
                raise UserError(f"the optimizer {self.name} cannot have {key}={value}; {rule}")

    def factor(self, step: int, steps: int) -> float:
        """What the rates are multiplied by in a step, 0 to steps - 1, of a fit."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        share = (step - self.warmup) / max(1, steps - self.warmup)
        return {"constant": 1.0, "linear": 1 - share, "cosine": (1 + math.cos(math.pi * share)) / 2}[self.decay]

    def over(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Torch's optimizer of groups of parameters, each with its learning rate."""
        momentum = {"momentum": self.momentum} if self.momentum else {}
        kind = lookup("local.optimizer", self.name, _KINDS)
        return kind(groups, lr=self.lr, weight_decay=self.weight_decay, **momentum)
