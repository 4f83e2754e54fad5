"""Sequences of a micro-batch end to end in one row of tokens, without padding: how they are laid out, and an attention
in which each token sees its own sequence alone.

Shape letters: N sequences, S tokens of all of them, n target tokens, H heads, D size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from llm_fed.engine.packing import Grid, TokenSequence, repeated

NAME = "llm_fed_end_to_end"  # of the attention, among those of transformers
CAPABILITY = 8, 0  # of a GPU, for products by group
WINDOW = "sliding_attention"  # how transformers names layers with windows
# Families that were compared with training in rows (tests/engine/test_padding_free.py), windows of attention too.
FAMILIES = frozenset(("gemma3_text", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3"))
Attention: TypeAlias = Callable[..., tuple[Tensor, None]]  # as layers of transformers call it
LARGEST_HEAD, HEADS_OF = 256, 8  # of torch's kernel: the most numbers of a head, and what they are a multiple of


@dataclass(frozen=True)
class FlatSequences:
    """Where in a row of tokens each sequence begins."""

    borders: Tensor  # (N + 1,) int32: the beginning of each, and the end of the last
    longest: int  # at least as many tokens as the longest has


@dataclass(frozen=True)
class FlatBatch:
    """Examples end to end; on the CPU."""

    input_ids: Tensor  # (1, S)
    positions: Tensor  # (1, S) of each token in its sequence
    labels: Tensor  # (n,) the target tokens
    rows: Tensor  # (n,) the example of each
    indices: Tensor  # (n,) where in S stands the token that predicts each
    sequences: FlatSequences

    @property
    def inputs(self) -> Mapping[str, Tensor | FlatSequences]:
        """What a model is given on its device, `attending` so; its layers hand on what they do not know."""
        return {"input_ids": self.input_ids, "position_ids": self.positions, "sequences": self.sequences}


def flattened(examples: Sequence[TokenSequence]) -> FlatBatch:
    """Put examples end to end."""
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    ids = torch.tensor([token for example in examples for token in example.input_ids])
    target = torch.tensor([each for example in examples for each in (False, *example.target[1:])])
    indices = target.nonzero().flatten() - 1
    owner = torch.arange(len(examples)).repeat_interleave(lengths)
    positions = torch.arange(len(ids)) - borders[:-1].repeat_interleave(lengths)
    sequences = FlatSequences(borders.to(torch.int32), int(lengths.max()))
    return FlatBatch(ids[None], positions[None], ids[indices + 1], owner[indices], indices, sequences)


def widened(batch: FlatBatch, grid: Grid, longest: int = 0) -> FlatBatch:
    """The batch in a shape of the grid. Further tokens are beginnings of the last sequence, so that they hold nothing
    that is not finite where it does not; further targets are the last one, and further sequences are empty. `longest`:
    tokens of the longest sequence of all batches that should have few shapes."""
    known = batch.sequences.borders.tolist()
    tokens, last = known[-1], known[-1] - known[-2]
    wide, targets = grid.end_to_end(tokens), grid.targets(len(batch.labels))
    borders = [*known, *range(tokens + last, wide, last)]
    borders += [wide] * (1 + grid.rows(len(borders)) - len(borders))
    again = torch.cat([torch.arange(tokens), tokens - last + torch.arange(wide - tokens) % last])
    labels, rows, indices = (repeated(each, targets) for each in (batch.labels, batch.rows, batch.indices))
    longest = grid.attended(max(longest, batch.sequences.longest))
    sequences = FlatSequences(torch.tensor(borders, dtype=torch.int32), longest)
    return FlatBatch(batch.input_ids[:, again], batch.positions[:, again], labels, rows, indices, sequences)


@contextmanager
def attending(model: nn.Module, name: str, attend: Attention) -> Iterator[None]:
    """Within, a model's layers use this attention, which transformers knows by the name from then on. A backward pass
    belongs inside, too, as it may compute layers again."""
    AttentionInterface.register(name, attend)  # it knows no masks for this name, so that it makes none
    configs = _configs(model)
    before = [config._attn_implementation_internal for config in configs]
    try:
        for config in configs:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation_internal = implementation


def _configs(model: nn.Module) -> list[PreTrainedConfig]:
    """The configurations that layers look up their attention in, each once."""
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    return list({id(each.config): each.config for each in models}.values())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    *,
    sequences: FlatSequences,
    **more: Tensor | float | None,
) -> tuple[Tensor, None]:
    """Causal attention (1, S, H, D) within each sequence, as a layer of transformers calls it.

    On a GPU with 16 bits it is one launch (torch's `varlen_attn`); elsewhere a call for each sequence. RuntimeError:
    the layer asks for more than that. `query`: (1, H, S, D); key and value may have fewer heads. `sliding_window`: how
    many tokens each one sees, itself among them; None: all before it.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    own = {"attention_mask": attention_mask, "dropout": dropout or None, "is_causal": None if causal else False}
    if unknown := [name for name in _UNKNOWN if (more | own).get(name) is not None]:
        raise RuntimeError(f"sequences that lie end to end have no attention with {', '.join(unknown)}")
    if kernel_takes(query.device, dtype := _dtype(query), query, value):
        query, key, value = (each.to(dtype) for each in (query, key, value))
        attended = _by_kernel(query, key, value, sequences, scaling, sliding_window)
    else:
        attended = one_by_one(query, key, value, sequences, scaling, sliding_window)
    return attended[None].contiguous(), None  # as from other attentions of transformers; some layers rely on it


_UNKNOWN = ("softcap", "position_bias", "s_aux", "sinks", "head_mask", "attention_mask", "dropout", "is_causal")


def one_by_one(
    query: Tensor, key: Tensor, value: Tensor, sequences: FlatSequences, scaling: float | None, window: int | None
) -> Tensor:
    """Attention of one sequence after another, without a kernel: (S, H, D)."""
    lengths, parts = [length for length in sequences.borders.diff().tolist() if length], []
    for q, k, v in zip(*(each.split(lengths, 2) for each in (query, key, value)), strict=True):
        seen = None if window is None else _seen(q.shape[2], window, q.device)
        parts.append(
            nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
            )
        )
    return torch.cat(parts, 2).squeeze(0).transpose(0, 1)


def _seen(length: int, window: int, device: torch.device) -> Tensor | None:
    """(length, length) which tokens (columns) each one sees; None where the window leaves out none."""
    if length <= window:
        return None
    indices = torch.arange(length, device=device)
    before = indices[:, None] - indices
    return (before >= 0) & (before < window)


def _by_kernel(
    query: Tensor, key: Tensor, value: Tensor, sequences: FlatSequences, scaling: float | None, window: int | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))  # (S, H, D)
    attend = varlen_attn
    if "enable_gqa" in signature(varlen_attn).parameters:  # before torch 2.12 it needs not be told of fewer heads
        attend = partial(varlen_attn, enable_gqa=query.shape[1] != key.shape[1])
    # The kernel counts the tokens before each one, transformers that one, too.
    before = -1 if window is None or window >= sequences.longest else window - 1
    borders, longest = sequences.borders, sequences.longest
    attended = attend(query, key, value, borders, borders, longest, longest, scale=scaling, window_size=(before, 0))
    assert isinstance(attended, Tensor)
    return attended


def _dtype(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def kernel_takes(device: torch.device, dtype: torch.dtype, query: Tensor, value: Tensor) -> bool:
    """Whether torch's kernel computes this attention."""
    size = query.shape[-1]
    fits = size == value.shape[-1] <= LARGEST_HEAD and size % HEADS_OF == 0
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and fits


def has_kernels(device: torch.device) -> bool:
    """Whether this GPU has torch's products and attention for sequences end to end."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= CAPABILITY
