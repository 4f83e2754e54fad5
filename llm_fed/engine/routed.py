"""Adapters on the experts of a mixture: each token goes through the experts that its router chose, with the adapters of
the row that it belongs to.

Shape letters: N rows, T tokens of each, C experts chosen for each token, E experts, r rank; S = N T C.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError


@dataclass(frozen=True)
class RoutedExperts:
    """What a block of fused experts computes while a bank is attached, in the place of its own `forward`.

    As tokens know their row, all of a row's products with A, and with B, are one batched product over all experts of
    which the chosen ones count. That is E times the products with the chosen experts' adapters alone.

    Args:
        factors: by the name of a parameter its A (N, E, r, in) and B (N, E, out, r).
        scaling: s of the adapters.
    """

    name: str
    block: Any
    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float
    num_rows: int  # N

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """(N T, hidden) of the tokens (N T, hidden), their experts (N T, C), and the weights of these (N T, C)."""
        block, choices = self.block, chosen.shape[-1]
        if hidden.dim() != 2 or len(hidden) % self.num_rows:
            raise UserError(
                f"{self.name} cannot have adapters: it was given tokens of shape {tuple(hidden.shape)} for "
                f"{self.num_rows} rows, and cannot tell whose they are; leave out adapter.target_parameters"
            )
        of = chosen.reshape(-1)  # (S,)
        routed = _Routed(of, of.argsort(stable=True), block)
        x = hidden.repeat_interleave(choices, 0)
        middle = self._product("gate_up_proj" if block.has_gate else "up_proj", x, routed)
        middle = block._apply_gate(middle) if block.has_gate else block.act_fn(middle)
        y = self._product("down_proj", middle, routed)
        if getattr(block, "has_post_expert_norm", False):
            y = block.post_expert_norm(y)
        return (y * weights.reshape(-1, 1)).view(-1, choices, y.shape[-1]).sum(1).to(hidden.dtype)

    def _product(self, parameter: str, x: Tensor, routed: _Routed) -> Tensor:
        """W x + s B A x of each token's expert, (S, out)."""
        y = routed.product(parameter, x)
        if parameter not in self.factors:
            return y
        a, b = (factor.to(x.device) for factor in self.factors[parameter])
        number, experts = self.num_rows, a.shape[1]
        x = x if torch.is_autocast_enabled(x.device.type) else x.to(a.dtype)
        ranks = torch.bmm(x.view(number, -1, x.shape[-1]), a.flatten(1, 2).mT).unflatten(-1, (experts, -1))
        own = nn.functional.one_hot(routed.of, experts).view(number, -1, experts, 1).to(ranks)
        added = torch.bmm((ranks * own).flatten(2), b.transpose(2, 3).flatten(1, 2))
        return (y + self.scaling * added.view(y.shape)).to(y.dtype)


@dataclass(frozen=True)
class _Routed:
    """The base's own products."""

    of: Tensor  # (S,) the expert of each
    order: Tensor  # (S,) that puts those of an expert side by side
    block: Any

    def product(self, parameter: str, x: Tensor) -> Tensor:
        """W x + bias of each token's expert, (S, out)."""
        weight: Tensor = getattr(self.block, parameter)
        bias = getattr(self.block, f"{parameter}_bias") if self.block.has_bias else None
        weight = weight if self.block.is_transposed else weight.transpose(1, 2)  # (E, in, out)
        ends = (self.of[:, None] == torch.arange(len(weight), device=x.device)).sum(0).cumsum(0).to(torch.int32)
        y = _grouped(x[self.order].to(weight.dtype), weight, ends)
        y = torch.empty_like(y).index_copy(0, self.order, y)
        return y if bias is None else y + bias[self.of]


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[:ends[0]] @ weight[0], x[ends[0]:ends[1]] @ weight[1], ... below each other, as transformers computes it."""
    from transformers.integrations import moe  # takes seconds to import

    if weight.dtype == torch.float64:  # which torch's grouped product does not have
        return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
    return moe._grouped_mm(x, weight, ends)


@contextmanager
def in_place_of(block: nn.Module, forward: RoutedExperts) -> Iterator[None]:
    """Within it the block computes `forward`."""
    before = vars(block).get("forward")  # of accelerate, where layers lie on several devices
    block.forward = forward  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is None:
            del block.forward
        else:
            block.forward = before
