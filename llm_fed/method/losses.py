"""Losses of logits that methods and engines share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_ROWS = 256  # rows of logits that `head_losses` holds: with fewer the products take longer


def divergence(taught: Tensor, teacher: Tensor) -> Tensor:
    """(N,): KL(softmax(teacher) || softmax(taught)) of logits (N, C), summed over classes; no gradient for the
    teacher."""
    wanted = teacher.detach().log_softmax(-1)
    return nn.functional.kl_div(taught.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)


class _HeadLosses(torch.autograd.Function):
    """(n,): of each label its negative log-likelihood under the logits that a frozen linear layer gives, never holding
    more than a few rows of them.

    With the loss of a token comes its gradient for the layer's inputs, as large as these. So nothing of the logits'
    size is kept for the backward pass, whatever is made of the losses. `inputs`: (n, H), on a CPU. `weight`, `bias`:
    (C, H) and (C,), in the dtype of the inputs; the softmax is computed in float32 at least.
    """

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


head_losses: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor] = _HeadLosses.apply
