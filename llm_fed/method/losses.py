"""Losses of logits that methods and engines share."""

from __future__ import annotations

from torch import Tensor, nn


def divergence(taught: Tensor, teacher: Tensor) -> Tensor:
    """(N,): KL(softmax(teacher) || softmax(taught)) of logits (N, C), summed over classes; no gradient for the
    teacher."""
    wanted = teacher.detach().log_softmax(-1)
    return nn.functional.kl_div(taught.log_softmax(-1), wanted, reduction="none", log_target=True).sum(-1)
