"""Whose tokens a layer is given: rows of a batch that each go through an adapter of their own, or sequences end to end
in one row, of which each adapter has a stretch.

Shape letters: N rows, T tokens of each, S tokens of one row, G adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError

ALIGNED = 8  # numbers of 16 bits: torch's grouped product wants rows of whole 16 bytes


@dataclass(frozen=True)
class TokenRows:
    """Each of N rows is the tokens of one adapter, which stands there once for each row: factors (N, out, in).
    `TokenGroups` has the same methods for one row of tokens."""

    count: int  # N

    def inputs(self, name: str, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """A layer's inputs with its tokens in the last dimension but one, in `dtype` unless autocast chooses; and
        whether it does."""
        if x.shape[0] != self.count:
            raise _unknown(name, f"{x.shape[0]} rows for {self.count}")
        autocast = torch.is_autocast_enabled(x.device.type)
        x = x.reshape(self.count, -1, x.shape[-1])
        return (x if autocast else x.to(dtype)), autocast

    def product(self, x: Tensor, factors: Tensor) -> Tensor:
        """Each token (..., in) times the factor (out, in) of its adapter."""
        return torch.bmm(x, factors.mT)

    def added(self, y: Tensor, x: Tensor, factors: Tensor, scaling: float, same: bool) -> Tensor:
        """y + scaling * product(x, factors); `same`: all have one dtype, perhaps by autocast."""
        if same:
            return torch.baddbmm(y, x, factors.mT, alpha=scaling)
        return y + scaling * torch.bmm(x, factors.mT)

    def spread(self, values: Tensor) -> Tensor:
        """Values (adapters, 1, C), so that they can stand beside the tokens of each adapter."""
        return values


@dataclass(frozen=True)
class TokenGroups:
    """One row of S tokens, of which each of G adapters has a stretch: factors (G, out, in).

    A product is one call (torch's `grouped_mm`), but in float64, where it is a product for each adapter.
    """

    ends: Tensor  # (G,) int32, where the tokens of each end
    of: Tensor  # (S,) whose each token is

    def inputs(self, name: str, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        if len(x) != 1 or x[..., 0].numel() != len(self.of):
            raise _unknown(name, f"inputs of shape {tuple(x.shape)} for a row of {len(self.of)} tokens")
        autocast = torch.is_autocast_enabled(x.device.type)
        x = x.reshape(1, -1, x.shape[-1])
        return x.to(torch.get_autocast_dtype(x.device.type) if autocast else dtype), autocast

    def product(self, x: Tensor, factors: Tensor) -> Tensor:
        out = factors.shape[1]
        if self.by_kernel(x) and out % ALIGNED:  # further rows of zeros
            factors = nn.functional.pad(factors, (0, 0, 0, -out % ALIGNED))
        if self.by_kernel(x) and factors.shape[2] % ALIGNED:
            more = -factors.shape[2] % ALIGNED
            x, factors = nn.functional.pad(x, (0, more)), nn.functional.pad(factors, (0, more))
        # `x[0]` would make the backward pass fill tensors with zeros first, here and in `end_to_end`.
        return _Product.apply(x.squeeze(0), factors.to(x.dtype), self)[None, :, :out]

    def added(self, y: Tensor, x: Tensor, factors: Tensor, scaling: float, same: bool) -> Tensor:
        return torch.add(y, self.product(x, factors), alpha=scaling)

    def spread(self, values: Tensor) -> Tensor:
        return values[:, 0].index_select(0, self.of)[None]

    def by_kernel(self, x: Tensor) -> bool:
        """Whether torch's grouped product, which has no float64, computes with these tokens."""
        return x.dtype != torch.float64

    def stretches(self) -> list[slice]:
        """The tokens of each adapter; waits for a GPU."""
        ends = self.ends.tolist()
        return [slice(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]


class _Product(torch.autograd.Function):
    """Tokens x (S, in) times the factor (out, in) of their group, (S, out)."""

    @staticmethod
    def forward(ctx, x: Tensor, factors: Tensor, groups: TokenGroups) -> Tensor:
        ctx.save_for_backward(x, factors)
        ctx.groups = groups
        return _times(x, factors.mT, groups)

    @staticmethod
    def backward(ctx, given: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, factors = ctx.saved_tensors
        given, (of_x, of_factors, _) = given.contiguous(), ctx.needs_input_grad
        back = _times(given, factors, ctx.groups) if of_x else None
        return back, _outer(given, x, ctx.groups) if of_factors else None, None


def _times(x: Tensor, factors: Tensor, groups: TokenGroups) -> Tensor:
    """x (S, a) by group times (G, a, b): (S, b)."""
    if groups.by_kernel(x):
        return nn.functional.grouped_mm(x, factors, offs=groups.ends)
    return torch.cat([x[at] @ factor for at, factor in zip(groups.stretches(), factors, strict=True)])


def _outer(given: Tensor, x: Tensor, groups: TokenGroups) -> Tensor:
    """(G, b, a): of each group's tokens the sum of given (S, b) by x (S, a)."""
    if groups.by_kernel(x):
        return nn.functional.grouped_mm(given.mT, x, offs=groups.ends)
    return torch.stack([given[at].mT @ x[at] for at in groups.stretches()])


def groups_of(owners: Sequence[int], lengths: Sequence[int]) -> tuple[list[int], TokenGroups]:
    """The adapters that sequences go through, and their groups, on the host.

    Args:
        owners: (N,) of each sequence, those of one adapter side by side.
        lengths: (N,) its tokens.
    """
    tokens: dict[int, int] = {}
    for owner, length in zip(owners, lengths, strict=True):
        tokens[owner] = tokens.get(owner, 0) + length
    sizes = torch.tensor(list(tokens.values()))
    of = torch.arange(len(tokens)).repeat_interleave(sizes)
    return list(tokens), TokenGroups(sizes.cumsum(0).to(torch.int32), of)


def _unknown(name: str, given: str) -> UserError:
    return UserError(
        f"{name} cannot have an adapter: it was given {given}, as it reads all tokens of a batch as one list and "
        "cannot tell whose they are; leave it out of adapter.target_modules"
    )
