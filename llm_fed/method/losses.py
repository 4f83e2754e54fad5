"""Losses of logits that methods and engines share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_AT_ONCE = 2**20  # logits that a CPU's cache holds
_ROWS = 256  # rows of logits that `head_losses` holds: with fewer the products take longer


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
        indices = labels[:, None]
        if ctx.needs_input_grad[0]:
            likely = logits.log_softmax(1)
            ctx.save_for_backward(likely, indices)
            return -likely.gather(1, indices)[:, 0]
        rows = _rows_at_once(logits)
        parts = zip(logits.split(rows), indices.split(rows), strict=True)
        return torch.cat([-part.log_softmax(1).gather(1, own)[:, 0] for part, own in parts])

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        likely, indices = ctx.saved_tensors
        rows, backward = _rows_at_once(likely), torch.ops.aten._log_softmax_backward_data.out
        given = -upstream[:, None].to(likely.dtype)
        for part, own, factors in zip(likely.split(rows), indices.split(rows), given.split(rows), strict=True):
            backward(torch.zeros_like(part).scatter_(1, own, factors), part, 1, likely.dtype, out=part)
        return likely, None


def head_losses(inputs: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """(n,): `token_losses` of the logits that a frozen linear layer gives, never holding more than a few rows of them.

    With the loss of a token comes its gradient for the layer's inputs, as large as these. So nothing of the logits'
    size is kept for the backward pass, whatever is made of the losses.

    Args:
        inputs: (n, H), on a CPU.
        weight, bias: (C, H) and (C,), in the dtype of the inputs; the softmax is computed in float32 at least.
    """
    losses: Tensor = _HeadLosses.apply(inputs, weight, bias, labels)
    return losses


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
        dtype = torch.promote_types(inputs.dtype, torch.float32)
        losses = inputs.new_empty(len(inputs), dtype=dtype)
        back = torch.empty_like(inputs) if ctx.needs_input_grad[0] else None
        memory = inputs.new_empty(min(_ROWS, len(inputs)), len(weight))
        with torch.autocast("cpu", enabled=False):
            for at in range(0, len(inputs), _ROWS):
                rows, own = slice(at, at + _ROWS), labels[at : at + _ROWS, None]
                logits = memory[: len(own)]
                if bias is None:
                    torch.mm(inputs[rows], weight.T, out=logits)
                else:
                    torch.addmm(bias, inputs[rows], weight.T, out=logits)
                likely = logits.to(dtype)
                torch.log_softmax(likely, 1, out=likely)
                losses[rows] = -likely.gather(1, own)[:, 0]
                if back is not None:
                    slopes = likely.exp_().scatter_add_(1, own, likely.new_full(own.shape, -1.0))
                    torch.mm(slopes.to(inputs.dtype), weight, out=back[rows])
        if back is not None:
            ctx.save_for_backward(back)
        return losses

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return (back * upstream[:, None]).to(back.dtype), None, None, None


def _rows_at_once(logits: Tensor) -> int:
    return max(1, _AT_ONCE // max(1, logits.shape[1]))
