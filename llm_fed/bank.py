"""AdapterBank: the LoRA adapters of K clients around one frozen base; each row of a batch uses its own.

Shape letters: K adapters, N rows of a batch, T tokens, r rank, P parameters of one adapter, D inputs of all
adapted layers together.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from llm_fed.config import AdapterConfig
from llm_fed.errors import UserError
from llm_fed.state import Layout, State


@dataclass(frozen=True)
class Lora:
    """The structure of what clients train (Hu et al. 2022); equal ones are trained together."""

    rank: int
    alpha: float
    dropout: float
    target_modules: tuple[str, ...] | str  # as in PEFT: last parts of names, a regular expression, or all-linear

    @classmethod
    def from_config(cls, config: AdapterConfig) -> Lora:
        """Raises UserError where a value cannot be an adapter's."""
        chosen = config.target_modules
        if config.rank < 1:
            raise UserError(f"adapter.rank is {config.rank}; it must be at least 1")
        if not (math.isfinite(config.alpha) and config.alpha > 0):
            raise UserError(f"adapter.alpha is {config.alpha}; it must be a positive number")
        if not 0 <= config.dropout < 1:
            raise UserError(f"adapter.dropout is {config.dropout}; it must be at least 0 and less than 1")
        if not chosen:
            raise UserError("adapter.target_modules is empty; name layers to adapt, e.g. [q_proj, v_proj]")
        chosen = chosen if isinstance(chosen, str) else tuple(chosen)
        return cls(config.rank, config.alpha, config.dropout, chosen)

    @property
    def scaling(self) -> float:
        """s: what the adapter's output B A x is multiplied by."""
        return self.alpha / self.rank


def targets(model: nn.Module, structure: Lora) -> dict[str, nn.Module]:
    """The linear layers that the structure adapts, by name and in module order, chosen as PEFT chooses them.

    Linear layers are `nn.Linear` and its subclasses (such as bitsandbytes' 4- and 8-bit layers), and the
    `Conv1D` of transformers.

    Raises:
        UserError: nothing matches, or something that matches is no linear layer.
    """
    chosen = structure.target_modules
    modules = {name: module for name, module in model.named_modules() if name}
    linear = {name: module for name, module in modules.items() if isinstance(module, nn.Linear | Conv1D)}
    if isinstance(chosen, str) and chosen.lower() == "all-linear":
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        return {name: module for name, module in linear.items() if module is not head}
    if isinstance(chosen, str):
        try:
            found = [name for name in modules if re.fullmatch(chosen, name)]
        except re.error as error:
            raise UserError(f"adapter.target_modules={chosen!r} is no regular expression: {error}") from error
    else:
        endings = tuple("." + ending for ending in chosen)
        found = [name for name in modules if name in chosen or name.endswith(endings)]
    if not found:
        known = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        wanted = chosen if isinstance(chosen, str) else chosen[0].rpartition(".")[2]
        close = difflib.get_close_matches(wanted, known, n=8, cutoff=0)
        raise UserError(
            f"adapter.target_modules={chosen!r} matches no layer of {type(model).__name__}; "
            f"it has linear layers named {', '.join(close)}{', ...' if len(known) > len(close) else ''}"
        )
    for name in found:
        if name not in linear:
            raise UserError(
                f"adapter.target_modules={chosen!r} matches {name}, a {type(modules[name]).__name__}; "
                "only linear layers can be adapted"
            )
    return {name: linear[name] for name in found}


def layout(model: nn.Module, structure: Lora) -> Layout:
    """One adapter's entries, in module order: `{module}.lora_A` (r, in) and `{module}.lora_B` (out, r)."""
    names: list[str] = []
    shapes: list[tuple[int, ...]] = []
    for name, module in targets(model, structure).items():
        inputs, outputs = _sizes(module)
        names += [f"{name}.lora_A", f"{name}.lora_B"]
        shapes += [(structure.rank, inputs), (outputs, structure.rank)]
    return Layout(tuple(names), tuple(shapes))


def draw(model: nn.Module, structure: Lora, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> State:
    """A fresh adapter as PEFT draws it, from a CPU generator: A uniform within 1/sqrt(in) of zero, B zero."""
    places = layout(model, structure)
    state = State(places, torch.zeros(places.size, dtype=dtype))
    for name in state:
        if name.endswith(".lora_A"):
            nn.init.kaiming_uniform_(state[name], a=math.sqrt(5), generator=generator)
    return state


def freeze(model: nn.Module) -> None:
    """Make `model` a base: no gradients, eval mode, and 4-bit weights that stay fit for training."""
    model.requires_grad_(False).eval()
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes' first evaluation would turn the weights, for good, into a form
        # whose product has no backward: all gradients that pass through the layer would silently be lost.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


class AdapterBank:
    """K adapters of one structure around one base.

    `rows` (K, P) holds the adapters; a backward pass adds their gradients to `grads` (K, P), which whoever
    takes steps sets to zero in between. So loading, reading, clipping and optimising all work on plain rows.
    The base is frozen and put in eval mode (its own dropout is off); beyond that it is not changed.

    Args:
        model: the base; it may be quantised or of any float dtype.
        structure: what the adapters are.
        num_rows: K.
        dtype: of the adapters; a half-precision base usually carries float32 adapters under autocast.
        train: regular expression of the entries that receive gradients.

    Raises:
        UserError: the structure or `train` matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Lora,
        num_rows: int,
        dtype: torch.dtype = torch.float32,
        train: str = r".*",
    ):
        freeze(model)
        self.model, self.structure = model, structure
        self.targets, self.layout = targets(model, structure), layout(model, structure)
        device = next(model.parameters()).device
        self.rows = torch.zeros(num_rows, self.layout.size, dtype=dtype, device=device)
        self.grads = torch.zeros_like(self.rows)
        trained = set(self.layout.matching(train))
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}  # views (K, ...) of rows and grads
        for name, place in self.layout.slices.items():
            shape = (num_rows, *self.layout.shape_of[name])
            entry = self.rows[:, place].view(shape).requires_grad_(name in trained)
            self._entries[name] = entry, self.grads[:, place].view(shape)
        self._inputs: dict[str, slice] = {}  # where each layer's inputs lie in a dropout mask
        self._width = 0  # D
        for name, module in self.targets.items():
            self._inputs[name] = slice(self._width, self._width + _sizes(module)[0])
            self._width = self._inputs[name].stop
        self._kept = max(1, round((1 - structure.dropout) * 2**16))  # of 2^16 inputs
        self._attached = False

    def load(self, k: int, state: State) -> None:
        """Put `state` into row k.

        Raises:
            ValueError: the state has other entries than the bank.
        """
        if state.layout != self.layout:
            raise ValueError(f"row {k}: the state's entries are not those of {self.structure}")
        self.rows[k].copy_(state.row)

    def read(self, k: int) -> State:
        """A copy of row k, on the bank's device."""
        return State(self.layout, self.rows[k].clone())

    def draw_masks(self, seeds: Sequence[int], lengths: Sequence[int]) -> Tensor | None:
        """Dropout masks (N, T, D) for `attached`, True where an input is kept; None without dropout.

        Row n's mask depends on seeds[n] and lengths[n] alone: not on padding, nor on the rows beside it. The
        share of inputs kept is 1 - dropout to within 2^-17. A mask is one byte per input of an adapted layer,
        held until the backward pass is done, also under activation checkpointing.
        """
        if self._kept == 2**16:
            return None
        device, width = self.rows.device, self._width
        masks = torch.zeros(len(seeds), max(lengths), width, dtype=torch.bool, device=device)
        generator = torch.Generator(device)
        for mask, seed, length in zip(masks, seeds, lengths, strict=True):
            # 16 bits per input, cut from 64-bit words, take a quarter of the time of bernoulli_ on a CPU.
            words = torch.empty(-(-length * width // 4), dtype=torch.int64, device=device)
            bits = words.random_(-(2**63), None, generator=generator.manual_seed(seed)).view(torch.int16)
            torch.lt(bits[: length * width].view(length, width), self._kept - 2**15, out=mask[:length])
        return masks

    @contextmanager
    def attached(self, index: Tensor, masks: Tensor | None = None) -> Iterator[None]:
        """Within this context row n of every batch that the base processes goes through adapter index[n].

        Each adapted layer's output y becomes y + s B A x, in the dtype of y. Forward and backward both belong
        inside; backward through `Tensor.backward`, which adds to `grads`.

        Args:
            index: (N,), int64, on the CPU.
            masks: (N, T, D) from `draw_masks`: the inputs x that are kept. None: no dropout.

        Raises:
            RuntimeError: the bank is attached already.
            ValueError: (from the base's forward) a layer's input has not N rows.
        """
        if self._attached:
            raise RuntimeError("this bank is attached already; leave the first `with` block before the next")
        handles = []
        try:
            self._attached = True
            # Outside the layers, so that activation checkpointing does not repeat it. A path of its own for rows that
            # all share one adapter was not faster.
            where = index.to(self.rows.device)
            chosen = {entry: _Own.apply(*views, where) for entry, views in self._entries.items()}
            scaling = self.structure.scaling / (1 if masks is None else self._kept / 2**16)
            for name, module in self.targets.items():
                mask = None if masks is None else masks[..., self._inputs[name]]
                a, b = chosen[f"{name}.lora_A"], chosen[f"{name}.lora_B"]
                hook = partial(_adapt, name, len(index), a, b, scaling, mask)
                handles.append(module.register_forward_hook(hook))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._attached = False


class _Own(torch.autograd.Function):
    """values[index], (N, ...); backward adds to the bank's gradients at once, with no (K, ...) between."""

    @staticmethod
    def forward(ctx, values: Tensor, grads: Tensor, index: Tensor) -> Tensor:
        ctx.grads, ctx.index = grads, index
        return values.index_select(0, index)

    @staticmethod
    def backward(ctx, chosen: Tensor) -> tuple[None, None, None]:
        ctx.grads.index_add_(0, ctx.index, chosen)
        return None, None, None


def _adapt(
    name: str,
    num_rows: int,
    a: Tensor,
    b: Tensor,
    scaling: float,
    mask: Tensor | None,
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> Tensor:
    """One layer's forward hook, with a (N, r, in) and b (N, out, r)."""
    if inputs[0].shape[0] != num_rows:
        got = inputs[0].shape[0]
        raise ValueError(f"{name} was given {got} rows, but the adapter index has {num_rows}")
    x = inputs[0].reshape(num_rows, -1, inputs[0].shape[-1])
    y = output.reshape(num_rows, -1, output.shape[-1])
    if mask is not None:
        x = x * mask[:, : x.shape[1]]
    autocast = torch.is_autocast_enabled(x.device.type)
    if not autocast:
        x = x.to(a.dtype)
    hidden = torch.bmm(x, a.mT)
    if autocast or y.dtype == hidden.dtype:
        y = torch.baddbmm(y, hidden, b.mT, alpha=scaling)
    else:
        y = y + scaling * torch.bmm(hidden, b.mT)
    return y.view(output.shape).to(output.dtype)


def _sizes(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer."""
    if isinstance(module, Conv1D):  # keeps its weight transposed
        inputs, outputs = module.weight.shape
        return inputs, outputs
    assert isinstance(module, nn.Linear)
    return module.in_features, module.out_features
