"""What layers compute while a bank is attached. Their tokens are rows of a batch that each go through an adapter of
their own, or sequences end to end in one row, of which each adapter has a stretch.

Shape letters: N rows, T tokens of each, S tokens of one row, G adapters, E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError
from llm_fed.merge.delta import DENSE
from llm_fed.models.deberta import FOR_ALL_ROWS
from llm_fed.models.lora import weight_of
from llm_fed.state import FACTORS

Layers = dict[str, dict[str, Tensor]]  # by layer and by the last part of the name
ALIGNED = 8  # numbers of 16 bits: torch's grouped product wants rows of whole 16 bytes


@contextmanager
def forwards(changed: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Within, these modules compute these functions; accelerate replaces their own `forward`, too."""
    before = [module.forward if "forward" in vars(module) else None for module in changed]
    for module, forward in changed.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in zip(changed, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own


@dataclass(frozen=True)
class TokenRows:
    """Each of N rows is the tokens of one adapter, which stands there once for each row: factors (N, out, in).
    `TokenGroups` has the same methods for one row of tokens."""

    count: int  # N

    def inputs(self, name: str, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool]:
        """A layer's inputs (N, T, in), in `dtype` unless autocast chooses; and whether it does."""
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
    """One row of S tokens, of which each of G adapters has a stretch: factors (G, out, in). A product is one call
    (torch's `grouped_mm`), but in float64, where it is a product for each adapter."""

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


@dataclass(frozen=True)
class Adapted:
    """The forward hook of one layer while a bank is attached."""

    name: str
    tokens: TokenRows | TokenGroups
    a: Tensor  # (N, E r, in)
    b: Tensor  # (N, out, E r)
    router: Tensor | None  # (N, E, in)
    mix: Tensor | None  # (N, 1, E), or (1, S, E) of tokens
    scaling: float
    kept: float  # the share of the inputs that masks keep
    mask: Tensor | None  # (N, T, in) the inputs that are kept
    lengths: Tensor | None = None  # (N, 1, out) by which DoRA multiplies the layer's outputs

    def __call__(self, module: nn.Linear, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        device = output.device  # the base's layers may lie on several
        shared = getattr(inputs[0], FOR_ALL_ROWS, False)
        given = inputs[0].expand(len(self.a), -1, -1) if shared else inputs[0]
        x, autocast = self.tokens.inputs(self.name, given.to(device), self.a.dtype)
        y = output.reshape(len(output), -1, output.shape[-1])
        has, wanted = (x.shape[-1], y.shape[-1]), (self.a.shape[2], self.b.shape[1])
        if has != wanted:
            raise UserError(
                f"{self.name} cannot have an adapter: it makes {has[1]} numbers of {has[0]} for each token, where its "
                f"weight makes {wanted[1]} of {wanted[0]}; leave it out of adapter.target_modules"
            )
        gates, scaling, mask = self.mix, self.scaling, None if shared else self.mask
        if self.router is not None:
            scores = self.tokens.product(x, self.router.to(device))
            gates = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1)
        if mask is not None:
            x, scaling = x * mask[:, : x.shape[1]].to(device), scaling / self.kept  # a layer may see fewer tokens
        if self.lengths is not None:
            y = self._with_lengths(module, x, y, scaling, mask is not None, autocast)
            return y.view(len(y), *output.shape[1:]).to(output.dtype)
        hidden = self.tokens.product(x, self.a.to(device))  # (N, T, E r)
        if gates is not None:
            experts = hidden.unflatten(-1, (gates.shape[-1], -1))
            hidden = (experts * gates.to(device, hidden.dtype)[..., None]).flatten(-2)
        y = self.tokens.added(y, hidden, self.b.to(device), scaling, autocast or y.dtype == hidden.dtype)
        return y.view(len(y), *output.shape[1:]).to(output.dtype)

    def _with_lengths(
        self, module: nn.Linear, x: Tensor, y: Tensor, scaling: float, masked: bool, autocast: bool
    ) -> Tensor:
        """g (W x + s B A x) + bias, g the lengths; as in PEFT dropout takes inputs from all that the adapter adds."""
        assert self.lengths is not None
        lengths = self.tokens.spread(self.lengths.to(y.device))
        bias = module.bias
        if masked:
            w = weight_of(module)
            plain = nn.functional.linear(x / self.kept, w if autocast else w.to(x.dtype))
        else:
            plain = y if bias is None else y - bias
        hidden = self.tokens.product(self.tokens.product(x, self.a.to(y.device)), self.b.to(y.device))
        return y + (lengths - 1) * plain + lengths * scaling * hidden


@dataclass(frozen=True)
class OwnLinear:
    """The forward hook of a linear layer that every row has its own of, instead of the base's."""

    name: str
    tokens: TokenRows | TokenGroups
    weight: Tensor  # (N, out, in)
    bias: Tensor | None  # (N, out)

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, _ = self.tokens.inputs(self.name, inputs[0], self.weight.dtype)
        w = self.weight.mT
        y = torch.bmm(x, w) if self.bias is None else torch.baddbmm(self.bias[:, None], x, w)
        return y.view(output.shape).to(output.dtype)


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
    """The adapters that sequences go through, and their groups, on the host. `owners`: (N,) of each sequence, those of
    one adapter side by side. `lengths`: (N,) its tokens."""
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


class Deltas:
    """What lies beneath the adapters of a bank (`merge.delta`). Rows whose deltas are equal share one, so that a whole
    cohort adds it to a layer at once. A row that was not loaded has none."""

    def __init__(self, rows: Tensor):
        self._like = rows
        self._known: list[Layers] = [{}]  # as the states hold them
        self._different: list[Layers] = [{}]  # the same, as the rows are
        self._of = [0] * len(rows)

    def load(self, k: int, beneath: Layers) -> None:
        """Take what lies beneath the state of row k."""
        # Compared where the states are, as comparing on a GPU would wait for it.
        n = next((n for n, other in enumerate(self._known) if _equal(beneath, other)), len(self._known))
        self._of[k] = n
        if n == len(self._known):
            self._known.append(beneath)
            here = {layer: {part: t.to(self._like) for part, t in parts.items()} for layer, parts in beneath.items()}
            self._different.append(here)

    def on(self, owners: Sequence[int]) -> dict[str, DeltaHook]:
        """By layer its forward hook for a batch whose row n goes through the bank's row owners[n]."""
        requested = [self._of[k] for k in owners]
        parts: dict[str, list[tuple[Tensor | None, dict[str, Tensor]]]] = {}
        for n in sorted(set(requested)):
            rows = [index for index, other in enumerate(requested) if other == n]
            where = None if len(rows) == len(requested) else torch.tensor(rows).to(self._like.device)
            for name, delta in self._different[n].items():
                parts.setdefault(name, []).append((where, delta))
        return {name: DeltaHook(each, len(requested)) for name, each in parts.items()}


@dataclass(frozen=True)
class DeltaHook:
    """A forward hook: the layer's output y becomes y + D x, of the rows that have a D, in the dtype of y."""

    parts: list[tuple[Tensor | None, dict[str, Tensor]]]  # rows (None: all), and A (R, in) and B (out, R), or D
    num_rows: int  # N

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, y = inputs[0].to(output.device), output.reshape(self.num_rows, -1, output.shape[-1])
        x = x.reshape(self.num_rows, -1, x.shape[-1])
        for rows, delta in self.parts:
            part, here = x if rows is None else x[rows.to(x.device)], {k: v.to(y.device) for k, v in delta.items()}
            if not torch.is_autocast_enabled(x.device.type):
                part = part.to(next(iter(here.values())).dtype)
            more = nn.functional.linear(part, here[DENSE] if DENSE in here else here[FACTORS[0]])
            more = more if DENSE in here else nn.functional.linear(more, here[FACTORS[1]])
            y = y + more.to(y.dtype) if rows is None else y.index_add(0, rows.to(y.device), more.to(y.dtype))
        return y.view(output.shape)


def _equal(one: Layers, other: Layers) -> bool:
    mine, theirs = ({(n, m): t for n, parts in each.items() for m, t in parts.items()} for each in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())
