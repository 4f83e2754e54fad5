"""Prompts of several adapters as tensors and caches, and the pass that reads them.

Shape letters: N rows of a batch, T tokens with padding, S tokens of all rows without, V vocabulary, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache

from llm_fed.basics.errors import RunError
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.end_to_end import FlatBatch, attention, flattened, inputs_of
from llm_fed.engine.laid import on_device
from llm_fed.engine.masks import known_masks
from llm_fed.engine.prefixes import PromptRequest
from llm_fed.engine.tokens import groups_of
from llm_fed.models.base import Base
from llm_fed.tasks.common import Encoded


def begin(
    base: Base, bank: AdapterBank, batch: Sequence[PromptRequest], shared: Mapping[int, int]
) -> tuple[Tensor, Tensor, Cache | None]:
    """The tokens of each prompt that are still to be read (N, T), the mask of all its tokens (N, T or more), and the
    cache of those that the batch's prompts share and that were read here, if any."""
    device = base.model.device
    starts = {row: prompt[: shared.get(row, 0)] for row, prompt in batch}
    ids, mask = pad_left([prompt[len(starts[row]) :] for row, prompt in batch], device)
    if not any(starts.values()):
        return ids, mask, None
    before, known = pad_left(list(starts.values()), device)
    with bank.attached(torch.tensor(list(starts))):
        _, cache = forward(base, before, known, None, keep=1, padded=len({*map(len, starts.values())}) > 1)
    places = {row: place for place, row in enumerate(starts)}
    owner = torch.tensor([places[row] for row, _ in batch], device=device)
    select(cache, owner)
    return ids, torch.cat([known[owner], mask], dim=1), cache


def end_to_end(
    base: Base, bank: AdapterBank, batch: Sequence[PromptRequest], mix: Tensor | None = None
) -> tuple[Tensor, Cache, FlatBatch]:
    """Logits (N, 1, V) behind each prompt, the cache of all tokens, and how they lie there: one prompt behind the
    other, without padding.

    Args:
        batch: the prompts of one adapter side by side.
        mix: (N, E), where the gate of the bank's structure is `mix`.
    """
    device, lengths = base.model.device, [len(prompt) for _, prompt in batch]
    clients, groups = groups_of([row for row, _ in batch], lengths)
    flat = on_device(flattened([Encoded([*prompt], [False] * len(prompt)) for _, prompt in batch]), device)
    groups, last = on_device(groups, device), flat.sequences.borders[1:].long() - 1
    of_tokens = None
    if mix is not None:
        times = torch.tensor(lengths, device=mix.device)
        of_tokens = mix.repeat_interleave(times, 0, output_size=sum(lengths))
    attached = bank.attached(torch.tensor(clients), mix=of_tokens, groups=groups)
    with attention(base.model), attached, base.computing():
        output = base.model(**inputs_of(flat), use_cache=True, logits_to_keep=last)
    return output.logits[0, :, None], output[_cache(base)], flat


def _cache(base: Base) -> str:
    """What a base's forward calls its cache."""
    known = inspect.signature(base.model.forward).parameters
    before = "cache_params" if "cache_params" in known else "past_key_values"  # its names until transformers 5.23
    return "cache" if "cache" in known else before


def not_a_number(base: Base, length: int) -> RunError:
    return RunError(
        f"{base.name!r} computes NaN (not a number) for a text of {length} tokens, so its answers mean nothing; "
        "choose another base.dtype (bfloat16 or float32), or check the base for infinite weights"
    )


def forward(
    base: Base,
    ids: Tensor,
    mask: Tensor,
    cache: Cache | None,
    keep: int,
    padded: bool,
    positions: Tensor | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[Tensor, Cache]:
    """Logits (N, keep, V) of the last `keep` tokens of `ids` (N, T), and the cache with all of them.

    `mask` covers what is in the cache and the new tokens; it has a zero only if `padded`. `positions` (N, T) count
    real tokens only. The base's layers are given `more`, too.
    """
    if positions is None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {"position_ids": positions, "logits_to_keep": keep}
    known = inspect.signature(base.model.forward).parameters  # models with ALiBi take no positions
    name = _cache(base)
    if cache is not None and not _keeps_keys(cache):
        mask = mask[:, -ids.shape[1] :]
    with known_masks(padded), base.computing():
        output = base.model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            **{name: cache},
            **{option: value for option, value in options.items() if option in known},
            **(more or {}),
        )
    return output.logits[:, -keep:], output[name]


def _keeps_keys(cache: Cache) -> bool:
    """Whether a mask says more to a base than which of the new tokens are real. Where there are states alone, Mamba
    multiplies the new tokens by all of it."""
    layers = getattr(cache, "layers", None)
    return layers is None or any(hasattr(layer, "keys") for layer in layers)


def select(cache: Cache | None, rows: Tensor) -> None:
    """Keep (or repeat) these rows of the cache; every kind of cache can do so, as beam search needs it."""
    cast(Cache, cache).reorder_cache(cast(torch.LongTensor, rows))


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids (N, T) and the mask (N, T) of the real ones; as padding is masked, its value is free."""
    rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    return ids.to(device), mask.to(device)
