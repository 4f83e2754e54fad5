"""Losses of logits that methods and engines share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_AT_ONCE = 2**20  # logits that a CPU's cache holds


def divergence(taught: Tensor, teacher: Tensor) -> Tensor:
    """(N,): KL(softmax(teacher) || softmax(taught)) of logits (N, C), summed over classes; no gradient for the
    teacher."""
    wanted = teacher.detach().log_softmax(-1)
    return nn.functional.kl_div(taught.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(n,): of each label its negative log-likelihood under logits (n, C), the bits of `cross_entropy`.

    With a vocabulary for C the logits are the largest tensors of a pass by far, and a CPU asks the system for fresh
    memory for each: that took a tenth of a step. `cross_entropy` makes three more of their size, this makes one, and
    none where nothing needs a gradient.
    """
    labels = labels.to(logits.device)
    if logits.device.type != "cpu":
        return nn.functional.cross_entropy(logits, labels, reduction="none")
    losses: Tensor = _TokenLosses.apply(logits, labels)
    return losses


class _TokenLosses(torch.autograd.Function):
    """The gradient takes the place of the log-likelihoods, so backward works once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        places = labels[:, None]
        if ctx.needs_input_grad[0]:
            likely = logits.log_softmax(1)
            ctx.save_for_backward(likely, places)
            return -likely.gather(1, places)[:, 0]
        rows = _rows_at_once(logits)
        parts = zip(logits.split(rows), places.split(rows), strict=True)
        return torch.cat([-part.log_softmax(1).gather(1, own)[:, 0] for part, own in parts])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        likely, places = ctx.saved_tensors
        rows, backward = _rows_at_once(likely), torch.ops.aten._log_softmax_backward_data.out
        given = -upstream[:, None].to(likely.dtype)
        for part, own, factors in zip(likely.split(rows), places.split(rows), given.split(rows), strict=True):
            backward(torch.zeros_like(part).scatter_(1, own, factors), part, 1, likely.dtype, out=part)
        return likely, None


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _AT_ONCE // max(1, logits.shape[1]))
