"""Adapters on the experts of a mixture: each token goes through the experts that its router chose, with the adapters of
the row that it belongs to.

Shape letters: N rows, T tokens of each, C experts chosen for each token, E experts, r rank; S = N T C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.engine.layers import TokenGroups


@dataclass(frozen=True)
class RoutedExperts:
    """What a block of fused experts computes while a bank is attached, instead of its own `forward`.

    Choices that go through the same expert's adapter of the same row lie side by side, so that all products with A, and
    all with B, are one grouped product each, of N E groups. `factors`: by the name of a parameter its A (N, E, r, in)
    and B (N, E, out, r). `scaling`: s of the adapters.
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
        routed = _Routed.of_block(block, chosen.reshape(-1), self.num_rows)
        x = hidden.repeat_interleave(choices, 0)
        middle = self._product("gate_up_proj" if block.has_gate else "up_proj", x, routed)
        middle = block._apply_gate(middle) if block.has_gate else block.act_fn(middle)
        y = self._product("down_proj", middle, routed)
        if block.has_post_expert_norm:
            y = block.post_expert_norm(y)
        return (y * weights.reshape(-1, 1)).view(-1, choices, y.shape[-1]).sum(1).to(hidden.dtype)

    def _product(self, parameter: str, x: Tensor, routed: _Routed) -> Tensor:
        """W x + s B A x of each token's expert, (S, out)."""
        y = routed.product(parameter, x)
        if parameter not in self.factors:
            return y
        a, b = (factor.to(x.device).flatten(0, 1) for factor in self.factors[parameter])
        x = x.to(torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else a.dtype)
        groups = routed.groups
        added = groups.product(groups.product(x[routed.by_adapter][None], a), b)[0]
        added = torch.empty_like(added).index_copy(0, routed.by_adapter, added)
        return (y + self.scaling * added).to(y.dtype)


@dataclass(frozen=True)
class _Routed:
    """The base's own products, and which adapter each choice goes through."""

    block: Any
    of: Tensor  # (S,) the expert of each
    by_expert: Tensor  # (S,) the order that puts those of an expert side by side
    by_adapter: Tensor  # (S,) the order that puts those of an expert and a row side by side
    groups: TokenGroups  # in that order, N E of them

    @classmethod
    def of_block(cls, block: Any, of: Tensor, num_rows: int) -> _Routed:
        """Choices (S,) of the block's experts, as many by each row."""
        experts = len(block.down_proj)
        row = torch.arange(num_rows, device=of.device).repeat_interleave(len(of) // num_rows)
        adapter = row * experts + of
        by_adapter = adapter.argsort(stable=True)
        ends = _ends(adapter, num_rows * experts)
        return cls(block, of, of.argsort(stable=True), by_adapter, TokenGroups(ends, adapter[by_adapter]))

    def product(self, parameter: str, x: Tensor) -> Tensor:
        """W x + bias of each token's expert, (S, out)."""
        weight = self.block.get_parameter(parameter)
        bias = self.block.get_parameter(f"{parameter}_bias") if self.block.has_bias else None
        factors = weight if self.block.is_transposed else weight.transpose(1, 2)  # (E, in, out)
        y = _grouped(x[self.by_expert].to(weight.dtype), factors, _ends(self.of, len(weight)))
        y = torch.empty_like(y).index_copy(0, self.by_expert, y)
        return y if bias is None else y + bias[self.of]


def _ends(of: Tensor, groups: int) -> Tensor:
    """(groups,) int32: where each ends, when those of each (S,) lie side by side."""
    sizes = torch.zeros(groups, dtype=torch.int64, device=of.device).index_add(0, of, torch.ones_like(of))
    return sizes.cumsum(0).to(torch.int32)


def _grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x[:ends[0]] @ weight[0], x[ends[0]:ends[1]] @ weight[1], ... below each other, as transformers computes it."""
    from transformers.integrations import moe  # takes seconds to import

    if weight.dtype == torch.float64:  # which torch's grouped product does not have
        return torch.ops.transformers.grouped_mm_fallback(x, weight, ends)
    return moe._grouped_mm(x, weight, ends)
