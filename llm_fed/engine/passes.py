"""The forward and backward pass of a micro-batch in training.

Shape letters: K rows of a bank, n losses, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.end_to_end import attention
from llm_fed.engine.fused import fused
from llm_fed.engine.laid import Laid


def one_pass(
    model: AdaptedModel,
    bank: AdapterBank,
    laid: Laid,
    scales: Tensor | None,
    losses: Tensor,
    each: Tensor | None = None,
    own: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Add the gradients of a micro-batch to the bank's, or to `each`. It reads nothing of the host's memory but for
    `own`, so that a graph can hold it.

    Args:
        scales: (K,) by which losses are multiplied for the backward pass.
        losses: (K,) to which the weighted losses are added.
        each: (examples, P) that takes the gradients of single examples.
        own: losses (n,) of logits (n, C), in the place of the examples' own.
    """
    at_once = model.captures is not None or laid.groups is not None
    bank_in_place = bank.attached(
        laid.index, laid.masks, laid.mix, each=each, into=laid.into, below=laid.below, groups=laid.groups,
        cast=model.autocast if at_once and not bank.structure.dora else None,
    )  # fmt: skip
    flat = attention(model.model) if laid.groups else nullcontext()
    with fused(model.model) if model.fuses else nullcontext(), flat, bank_in_place:
        with model.computing():
            if own:
                loss = own(model.examples.logits(model.model, laid.batch, all_rows=bank.adapts_head))
            else:
                loss = model.examples.losses(
                    model.model, laid.batch, all_rows=bank.adapts_head, wanted=laid.wanted
                )  # fmt: skip
            loss = loss * laid.weights.to(loss.dtype)
        losses.index_add_(0, laid.owner, loss.detach().to(losses.dtype))
        (loss if scales is None else loss * scales[laid.owner]).sum().backward()
