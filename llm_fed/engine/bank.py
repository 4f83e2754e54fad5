"""AdapterBank: the LoRA adapters, and heads, of K clients around one frozen base; each row of a batch uses its own.

Shape letters: K adapters, E experts of each, N rows of a batch, T tokens, r rank, P parameters of one adapter with
all its experts and routers, D inputs of all adapted layers together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_fed.basics.errors import UserError
from llm_fed.engine.examples import TEXT, Examples
from llm_fed.engine.layers import Adapted, DeltaHook, Deltas, OwnLinear, TokenGroups, TokenRows, forwards
from llm_fed.engine.memory import budget_and_overhead, within_memory
from llm_fed.engine.routed import RoutedExperts
from llm_fed.merge.delta import under
from llm_fed.models.base import freeze
from llm_fed.models.fused_experts import fused_parameters
from llm_fed.models.lora import Lora, layout, sizes, targets, weight_of
from llm_fed.state import State, magnitude, pair, router

if TYPE_CHECKING:
    from llm_fed.engine.capture import Captures

Result = TypeVar("Result")


class AdapterBank:
    """K adapters of one structure around one base.

    `rows` (K, P) holds the adapters; a backward pass adds their gradients to `grads` (K, P), which whoever takes steps
    sets to zero in between. So loading, reading, clipping and optimising all work on plain rows. Linear layers that the
    structure trains whole (an image model's head) are entries of the rows like the others. The base is frozen and put
    in eval mode (its own dropout is off); beyond that it is not changed. UserError: the structure or `train` matches
    nothing, or a module that is to be trained whole is not linear.

    Attributes:
        drops: whether there is dropout; then `width` is D.
        adapts_head: whether the layer that a language model's logits come from is adapted.

    Args:
        model: the base; it may be quantised or of any float dtype.
        structure: what the adapters are.
        num_rows: K.
        dtype: of the adapters; a half-precision base usually carries float32 adapters under autocast.
        train: regular expression of the entries that receive gradients.
    """

    def __init__(
        self, model: nn.Module, structure: Lora, num_rows: int, dtype: torch.dtype = torch.float32, train: str = r".*"
    ):
        freeze(model)
        self.model, self.structure = model, structure
        self.targets, self.layout = targets(model, structure), layout(model, structure)
        self.fused = fused_parameters(model, structure.parameters) if structure.parameters else {}
        self.whole = {name: model.get_submodule(name) for name in structure.whole}
        for name, module in self.whole.items():
            if not isinstance(module, nn.Linear):
                raise UserError(
                    f"{name} is a {type(module).__name__}; only linear layers can be trained whole beside adapters"
                )
        self.rows = torch.zeros(num_rows, self.layout.size, dtype=dtype, device=next(model.parameters()).device)
        self.grads = torch.zeros_like(self.rows)
        trained = set(self.layout.matching(train))
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}  # views (K, ...) of rows and grads
        for name, span in self.layout.slices.items():
            shape = (num_rows, *self.layout.shape_of[name])
            entry = self.rows[:, span].view(shape).requires_grad_(name in trained)
            self._entries[name] = entry, self.grads[:, span].view(shape)
        self._inputs: dict[str, slice] = {}  # where each layer's inputs lie in a dropout mask
        self.width = 0
        for name, module in self.targets.items():
            self._inputs[name] = slice(self.width, self.width + sizes(module)[0])
            self.width = self._inputs[name].stop
        self._kept = max(1, round((1 - structure.dropout) * 2**16))  # of 2^16 inputs
        self.drops = self._kept < 2**16
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        self.adapts_head = any(module is head for module in self.targets.values())
        self._deltas: Deltas | None = None  # once a state has one
        self._attached = False

    def load(self, k: int, state: State) -> None:
        """Put `state`, with what lies beneath it, into row k. ValueError: the state has other entries than the bank."""
        if state.layout != self.layout:
            raise ValueError(f"row {k}: the state's entries are not those of {self.structure}")
        self.rows[k].copy_(state.row)
        if (below := under(state)) or self._deltas:
            self._deltas = self._deltas or Deltas(self.rows)
            self._deltas.load(k, below)

    def draw_masks(
        self, seeds: Sequence[int], lengths: Sequence[int], out: Tensor | None = None, *, end_to_end: bool = False
    ) -> Tensor | None:
        """Dropout masks (N, T, D) for `attached`, True where an input is kept; None without dropout.

        Row n's mask depends on seeds[n] and lengths[n] alone: not on padding, nor on the rows beside it. The share of
        inputs kept is 1 - dropout to within 2^-17. A mask is one byte per input, held until the backward pass is done.
        `out`: (N or more, T or more, D) that takes them; rows behind them are as the last. `end_to_end`: in one row (1,
        sum of lengths, D) instead.
        """
        if not self.drops:
            return None
        device = self.rows.device
        if out is None:
            rows, tokens = (1, sum(lengths)) if end_to_end else (len(seeds), max(lengths))
            out = torch.empty(rows, tokens, self.width, dtype=torch.bool, device=device)
        out.zero_()
        parts: Sequence[Tensor] = [mask[:length] for mask, length in zip(out, lengths, strict=False)]
        if end_to_end:
            parts = out[0, : sum(lengths)].split(list(lengths))
        generator = torch.Generator(device)
        for mask, seed in zip(parts, seeds, strict=True):
            size = mask.numel()
            # 16 bits per input, cut from 64-bit words, take a quarter of the time of bernoulli_ on a CPU.
            words = torch.empty(-(-size // 4), dtype=torch.int64, device=device)
            bits = words.random_(-(2**63), None, generator=generator.manual_seed(seed)).view(torch.int16)
            torch.lt(bits[:size].view(mask.shape), self._kept - 2**15, out=mask)
        if not end_to_end:
            out[len(seeds) :] = out[len(seeds) - 1]
        return out

    def beneath(self, owners: Sequence[int]) -> dict[str, DeltaHook]:
        """What lies beneath the adapters, by layer, for a batch whose row n goes through adapter owners[n]."""
        return self._deltas.on(owners) if self._deltas else {}

    def _lengths(self, name: str, module: nn.Module, chosen: Mapping[str, Tensor]) -> Tensor:
        """m / ||W + s B A|| (N, 1, out) of DoRA, by which a layer's outputs are multiplied. The divisor is a constant
        (Liu et al. 2024, Section 4.3). Its squares are those of W, twice the products of W and s B A, and those of
        s B A, so that no (N, out, in) is ever held."""
        s, (first, second) = self.structure.scaling, pair(name, "")
        a, b = chosen[first].detach(), chosen[second].detach()
        w = weight_of(module).to(a)
        across = torch.einsum("nor,nro->no", b, a @ w.T)
        own = torch.einsum("nor,nrq,noq->no", b, a @ a.mT, b)
        norms = (w.square().sum(1) + 2 * s * across + s * s * own).clamp_min(0).sqrt()
        return (chosen[magnitude(name)] / norms)[:, None]

    @contextmanager
    def attached(
        self,
        index: Tensor,
        masks: Tensor | None = None,
        mix: Tensor | None = None,
        each: Tensor | None = None,
        into: Tensor | None = None,
        below: Mapping[str, DeltaHook] | None = None,
        groups: TokenGroups | None = None,
    ) -> Iterator[None]:
        """Within this context row n of every batch that the base processes goes through adapter index[n].

        Each adapted layer's output y becomes y + s sum_e g_e B_e A_e x, in the dtype of y (g: see `Lora`). A router
        reads x before dropout; inputs that all rows share (`models.deberta`) have no dropout. A layer that is trained
        whole gives the row's own W x + b, without dropout. Forward and backward both belong inside; backward through
        `Tensor.backward`, which adds to `grads`, or to `each`.

        Args:
            index: (N,), int64; on the CPU unless `below` is given.
            masks: (N, T, D) from `draw_masks`: the inputs x that are kept; None: no dropout.
            mix: (N, E), for the gate `mix` alone: the weight of each expert in each row.
            each: (M, P): what takes the gradients of rows of the batch by themselves, instead of `grads`.
            into: (N,), which row of `each` takes that of each row of the batch.
            below: as of `beneath`, where it was made already.
            groups: the batch is one row of S tokens, of which each of these has a stretch: then group n goes through
                adapter index[n], masks are (1, S, D), and a mix is (S, E).

        Raises:
            RuntimeError: the bank is attached already.
            ValueError: `mix` is given without such a gate, or the other way round.
            UserError: (from the base's forward) a layer's input has not N rows.
        """
        if self._attached:
            raise RuntimeError("this bank is attached already; leave the first `with` block before the next")
        if mix is not None and self.structure.gate != "mix":
            raise ValueError(f"weights of rows belong to the gate `mix` alone; here it is {self.structure.gate}")
        if mix is None and self.structure.gate == "mix":
            raise ValueError("the gate `mix` needs the weights of each row, and here are none")
        handles, self._attached = [], True
        try:
            where = index.to(self.rows.device)
            takers, chosen = where if each is None else into, dict[str, Tensor]()
            # Outside the layers, so that activation checkpointing does not repeat it.
            for entry, (values, grads) in self._entries.items():
                if each is not None:
                    grads = each[:, self.layout.slices[entry]].view(len(each), *values.shape[1:])
                chosen[entry] = _Own.apply(values, grads, where, takers)
            below = self.beneath(index.tolist()) if below is None else below
            tokens = groups or TokenRows(len(index))
            if mix is not None:
                mix = mix.to(self.rows)[None] if groups else mix.to(self.rows)[:, None]
            for name, module in self.targets.items():
                if name in below:
                    handles.append(module.register_forward_hook(below[name]))
                pairs = [pair(name, expert) for expert in self.structure.experts]
                adapted = Adapted(
                    name=name,
                    tokens=tokens,
                    a=_joined([chosen[a] for a, _ in pairs], dim=1),
                    b=_joined([chosen[b] for _, b in pairs], dim=2),
                    router=chosen[router(name)] if self.structure.gate == "router" else None,
                    mix=mix,
                    scaling=self.structure.scaling,
                    kept=1 if masks is None else self._kept / 2**16,
                    mask=None if masks is None else masks[..., self._inputs[name]],
                    lengths=self._lengths(name, module, chosen) if self.structure.dora else None,
                )
                handles.append(module.register_forward_hook(adapted))
            for name, module in self.whole.items():
                own = OwnLinear(name, tokens, chosen[f"{name}.weight"], chosen.get(f"{name}.bias"))
                handles.append(module.register_forward_hook(own))
            with forwards(self._routed(chosen, len(index))) if self.fused else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._attached = False

    def _routed(self, chosen: Mapping[str, Tensor], num_rows: int) -> dict[nn.Module, RoutedExperts]:
        """By block of a mixture whose experts have adapters what it computes."""
        blocks: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}
        for name, fused in self.fused.items():
            pairs = [pair(f"{name}.{expert}", "") for expert in range(fused.experts)]
            a, b = (torch.stack([chosen[each[span]] for each in pairs], 1) for span in (0, 1))
            blocks.setdefault(name.rpartition(".")[0], {})[fused.name] = a, b
        found = {}
        for name, factors in blocks.items():
            block = self.model.get_submodule(name)
            found[block] = RoutedExperts(name, block, factors, self.structure.scaling, num_rows)
        return found


class _Own(torch.autograd.Function):
    """values[index], (N, ...); backward adds to the rows `into` of `grads` at once, with no (K, ...) between."""

    @staticmethod
    def forward(ctx, values: Tensor, grads: Tensor, index: Tensor, into: Tensor) -> Tensor:
        ctx.grads, ctx.into = grads, into
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx, chosen: Tensor) -> tuple[None, None, None, None]:
        ctx.grads.index_add_(0, ctx.into, chosen.to(ctx.grads.dtype))
        return None, None, None, None


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    """The experts side by side along their ranks."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class AdaptedModel:
    """A frozen base under adapters of one structure. `model` is a causal language model or an image classifier,
    quantised or of any float dtype."""

    model: nn.Module
    structure: Lora
    examples: Examples = TEXT
    autocast: torch.dtype | None = None  # compute in this dtype; the adapters keep theirs
    budget: int | None = None  # most tokens of a micro-batch; None: by device
    captures: Captures | None = None  # of training passes; None: they run as they are written
    padding_free: bool = False  # whether training lays texts end to end, where it can, and not in rows with padding
    fuses: bool = False  # whether training passes compute elementwise work `fused`

    @property
    def device(self) -> torch.device:
        """Where the base's inputs are wanted."""
        return next(self.model.parameters()).device

    @property
    def limits(self) -> tuple[int, int]:
        """Most tokens of a micro-batch, and what one more micro-batch costs in tokens."""
        most, overhead = budget_and_overhead(self.device)
        return self.budget or most, overhead

    def bank(self, num_rows: int, dtype: torch.dtype = torch.float32, train: str = r".*") -> AdapterBank:
        """So many adapters around the base, all zero, see `AdapterBank`."""
        return AdapterBank(self.model, self.structure, num_rows, dtype, train)

    def bank_of(self, states: Sequence[State]) -> AdapterBank:
        """One row for each of these states."""
        bank = self.bank(len(states), states[0].row.dtype)
        for row, state in enumerate(states):
            bank.load(row, state)
        return bank

    def computing(self) -> torch.autocast:
        """The context of a forward pass. A graph must make its own casts, as a cache does not outlive the pass."""
        cached = None if self.captures is None else False
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=cached)

    def within_memory(self, run: Callable[[AdaptedModel], Result]) -> Result:
        """What `run` makes of this model, with as large a budget as memory allows."""
        free = self.captures.clear if self.captures else lambda: None
        return within_memory(lambda budget: run(replace(self, budget=budget)), self.limits[0], free)
