"""Captured steps of answers: static memory for the keys and values of some rows, in which an answer that ends makes
room for the next prompt.

A row lies in its slot from the first column on and writes each token where its own text ends; what lies behind is
masked. A step is over all slots, in a width of a grid: in a slot that is free it means nothing.

Shape letters: N rows, T tokens with padding, S slots, C columns of each, H heads, D numbers of a head, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from llm_fed.engine import continuous
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.capture import Captures, Recorder
from llm_fed.engine.end_to_end import attending
from llm_fed.engine.fused import fused
from llm_fed.engine.packing import rounded
from llm_fed.models.base import Base

# Whose rows were compared with the same rows alone in slots (tests/engine/test_slots.py).
FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3"))
NAME = "llm_fed_slots"  # of the attention, among those of transformers
WIDTH, COLUMNS = 256, 64  # to which a step's columns are rounded up, so that few are captured; and memory's


def allowed(base: Base, bank: AdapterBank) -> bool:
    """Whether slots serve: all layers see all tokens of a row, wherever it lies, without weights beneath adapters."""
    beneath = bank.beneath(range(len(bank.rows)))
    return base.model.config.model_type in FAMILIES and continuous.plain(base) and not beneath


class SlotBatch(continuous.RunningBatch):
    """Answers in slots, whose steps are captured.

    Args:
        columns: C, tokens that the longest text may get.
        captures: says whether steps can be captured, as far as is known.
        fuses: whether elementwise work is computed `fused`.
    """

    def __init__(self, base: Base, bank: AdapterBank, most: int, columns: int, captures: Captures, fuses: bool = False):
        super().__init__(base, bank, most)
        device = base.model.device
        self._captures, self._fuses = captures, fuses
        self._recorder: Recorder | None = Recorder(captures, device, "answers")
        self._enough = max(1, most // 4)  # steps cost the same however many slots are in use
        self._free, self._slots = [*range(most)], list[int]()  # slots, those of the rows in their order
        self.columns, self.width = rounded(columns, 8, COLUMNS), 0
        self.numbers = torch.arange(most, device=device)
        self.position = torch.zeros(most, dtype=torch.int64, device=device)  # of the token that is read next
        self._ids = torch.zeros(most, 1, dtype=torch.int64, device=device)  # the last tokens, not in the slots yet
        self._index = torch.zeros(most, dtype=torch.int64, device=device)
        experts = len(bank.structure.experts) if bank.structure.gate == "mix" else 0
        self._mix = torch.zeros(most, experts, device=device, dtype=bank.rows.dtype) if experts else None
        self._cache = DynamicCache(config=base.model.config)
        self._layers = [SlotLayer(self) for _ in self._cache.layers]
        self._cache.layers = [*self._layers]

    def read(self, new: Sequence[continuous.LiveAnswer]) -> list[continuous.LiveAnswer]:
        texts = [each.text for each in new]
        taken, self._free = self._free[: len(new)], self._free[len(new) :]
        self.rows, self._slots = [*self.rows, *new], [*self._slots, *taken]
        ids, mask = continuous.pad_left(texts, self._base.model.device)
        with self._fused():
            logits, known = self._forward(new, ids, mask, None)
        slots = torch.tensor(taken, device=self._ids.device)
        columns = mask.argsort(stable=True, dim=1, descending=True)  # real tokens first; behind them all is masked
        for own, layer in zip(self._layers, continuous.layers_of(known), strict=True):
            own.put(slots, columns, layer)
        self._ids[slots] = continuous.likeliest(logits)
        self.position[slots] = torch.tensor([len(text) for text in texts], device=slots.device)
        self._index[slots] = torch.tensor([each.row for each in new], device=slots.device)
        if self._mix is not None:
            self._mix[slots] = torch.cat([each.mix for each in new if each.mix is not None]).to(self._mix)
        return self._hear(new, self._told(taken))

    def step(self) -> list[continuous.LiveAnswer]:
        assert self._recorder
        self.width = min(self.columns, rounded(max(len(each.text) for each in self.rows), 1, WIDTH))
        with self._fused():
            self._recorder.run(self.width, self._step)
        self._captures.answers = not self._recorder.why
        return self._hear(self.rows, self._told(self._slots))

    def close(self) -> None:
        """Give back keys, values and graphs now. Layers know this batch and the other way round, so they would stay
        until Python looks for such circles."""
        super().close()
        self._layers, self._recorder = [], None

    def _fused(self) -> AbstractContextManager[None]:
        return fused(self._base.model) if self._fuses else nullcontext()

    def _told(self, slots: Sequence[int]) -> list[int]:
        tokens = self._ids[:, 0].tolist()
        return [tokens[slot] for slot in slots]

    def _keep(self, kept: Sequence[int]) -> None:
        self._free += [slot for n, slot in enumerate(self._slots) if n not in kept]
        self.rows, self._slots = [self.rows[n] for n in kept], [self._slots[n] for n in kept]

    def _step(self) -> None:
        """The next token of all slots."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a graph must make its own casts
        try:
            with attending(self._base.model, NAME, attend), self._bank.attached(self._index, mix=self._mix, below={}):
                positions = self.position[:, None]
                seen = torch.arange(self.width, device=positions.device) <= positions
                # In float32 at least: 0 of what a row's token sees, else minus infinity.
                dtype = torch.promote_types(self._base.model.dtype, torch.float32)
                bias = torch.zeros((), dtype=dtype, device=seen.device).where(seen, -torch.inf)[:, None, None]
                logits, _ = continuous.forward(
                    self._base, self._ids.clamp(min=0), seen.long(), self._cache, keep=1, padded=True,
                    positions=positions, more={"slots_bias": bias},
                )  # fmt: skip
                self._ids.copy_(continuous.likeliest(logits[:, -1]))
        finally:
            torch.set_autocast_cache_enabled(cached)
        self.position.add_(1).clamp_(max=self.columns - 1)


class SlotLayer(DynamicLayer):
    """Keys and values (S, H, C, D) of one layer."""

    keys: Tensor
    values: Tensor

    def __init__(self, batch: SlotBatch):
        super().__init__()
        self._batch = batch

    def put(self, slots: Tensor, columns: Tensor, known: continuous.KeysAndValues) -> None:
        """What another layer knows of rows, of each these columns (N, T), into these slots (N,)."""
        if not self.is_initialized:
            batch = self._batch
            self.keys, self.values = (  # of zeros, as what is masked is multiplied by zero
                part.new_zeros(len(batch.numbers), part.shape[1], batch.columns, part.shape[3])
                for part in (known.keys, known.values)
            )
            self.is_initialized = True
        for own, part in ((self.keys, known.keys), (self.values, known.values)):
            indices = columns.to(part.device)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3])
            own[slots, :, : part.shape[2]] = part.gather(2, indices)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Tensor, **more: Tensor | int | None
    ) -> tuple[Tensor, Tensor]:
        batch = self._batch
        for own, part in ((self.keys, key_states), (self.values, value_states)):
            own[batch.numbers, :, batch.position] = part[:, :, 0].to(own.dtype)  # autocast may compute another one
        return self.keys[:, :, : batch.width], self.values[:, :, : batch.width]

    def get_seq_length(self) -> int:
        return self._batch.width - 1


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    *,
    slots_bias: Tensor,
    **more: Tensor | float | None,
) -> tuple[Tensor, None]:
    """Attention of one token of each row, which sees what `slots_bias` lets it see of its row: (S, 1, H, D). Keys that
    several heads share are not copied for each of them, as masks would make transformers do. `query`: (S, H, 1, D).
    `key`, `value`: (S, G, C, D), each for H / G heads."""
    rows, heads, _, size = query.shape
    shared = key.shape[1]
    scores = query.reshape(rows, shared, heads // shared, size) @ key.mT  # (S, G, H / G, C)
    scores = torch.add(slots_bias, scores, alpha=size**-0.5 if scaling is None else scaling)
    attended = scores.softmax(-1).to(value.dtype) @ value
    return attended.reshape(rows, 1, heads, size), None
