"""Answers in slots: static memory for the keys and values of some rows, in which an answer that ends makes room for the
next prompt.

A row lies in its slot from the first column on and writes each token where its own text ends; what lies behind is
masked. So no step copies what is known already, and a step can be captured over all slots and a width of a grid.

Shape letters: N rows, T tokens with padding, S slots, C columns of each, H heads, D numbers of a head, V vocabulary, E
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.capture import Captures, Recorder
from llm_fed.engine.continuous import LiveAnswer, RunningBatch, forward, likeliest, mix_of, pad_left, plain
from llm_fed.engine.end_to_end import attending
from llm_fed.engine.fused import fused
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.engine.packing import rounded
from llm_fed.models.base import Base

# Whose rows were compared with the same rows alone in slots (tests/engine/test_slots.py).
FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3"))
NAME, BIAS = "llm_fed_slots", "slots_bias"  # of the attention, and of what it is given, among those of transformers
WIDTH, COLUMNS = 256, 64  # to which a captured step's columns are rounded up, so that few are captured; and memory's


def allowed(base: Base) -> bool:
    """Whether answers of this base may be written in slots: all layers see all tokens of a row, wherever it lies."""
    return base.model.config.model_type in FAMILIES and plain(base)


class SlotLayer(DynamicLayer):
    """Keys and values (S, H, C, D) of one layer."""

    keys: Any
    values: Any

    def __init__(self, slots: Slots):
        super().__init__()
        self._slots = slots

    def put(self, at: int, keys: Tensor, values: Tensor) -> None:
        """Rows (N, H, T, D) into the slots from `at` on."""
        if not self.is_initialized:
            self.keys, self.values = (self._slots.memory(part) for part in (keys, values))
            self.is_initialized = True
        for own, part in ((self.keys, keys), (self.values, values)):
            own[at : at + len(part), :, : part.shape[2]] = part

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first columns of some slots into others."""
        for own in (self.keys, self.values):
            own[targets, :, :length] = own[sources, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        rows, width = len(key_states), self._slots.width
        indices, columns = self._slots.numbers[:rows], self._slots.position[:rows]
        for own, part in ((self.keys, key_states), (self.values, value_states)):
            own[indices, :, columns] = part[:, :, 0].to(own.dtype)  # autocast may compute keys in another one
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def get_seq_length(self) -> int:
        return self._slots.width - 1


class Slots:
    """So many slots, of which the first n hold a row each.

    Attributes:
        ids: (S, 1) the last token of each row, which its slot does not hold yet.
        captured: whether steps are captured, as far as is known: those cost the same however many slots are in use.

    Args:
        most: S.
        columns: C, as many tokens as the longest text may get.
        captures: steps are captured; None: they run as they are written.
    """

    def __init__(self, base: Base, bank: AdapterBank, most: int, columns: int, captures: Captures | None):
        self._base, self._bank, self._captures = base, bank, captures
        device = base.model.device
        self._most, self._columns = most, rounded(columns, 8, COLUMNS) if captures else columns
        self._cache: Cache = DynamicCache(config=base.model.config)
        self._layers = [SlotLayer(self) for _ in self._cache.layers]
        self._cache.layers = [*self._layers]
        self.width, self._count = 0, 0
        self.numbers = torch.arange(most, device=device)
        self.position = torch.zeros(most, dtype=torch.int64, device=device)  # of the token that is read next
        self.ids = torch.zeros(most, 1, dtype=torch.int64, device=device)
        self._index = torch.zeros(most, dtype=torch.int64, device=device)
        experts = len(bank.structure.experts) if bank.structure.gate == "mix" else 0
        self._mix = torch.zeros(most, experts, device=device, dtype=bank.rows.dtype) if experts else None
        self._recorder = Recorder(captures, device, "answers") if captures else None

    @property
    def captured(self) -> bool:
        return self._captures is not None and self._captures.answers

    def memory(self, like: Tensor) -> Tensor:
        """(S, H, C, D), of numbers, as what is masked is multiplied by zero."""
        return like.new_zeros(self._most, like.shape[1], self._columns, like.shape[3])

    def read(self, prompts: Sequence[Sequence[int]], owners: Sequence[int], mix: Tensor | None) -> None:
        """Prompts into free slots, under the adapters that are attached, and the first token of each answer.

        Args:
            owners: the row of the bank of each, which a captured step attaches.
            mix: (N, E).
        """
        ids, mask = pad_left(prompts, self._base.model.device)
        lengths = [len(prompt) for prompt in prompts]
        logits, known = forward(self._base, ids, mask, None, keep=1, padded=min(lengths) < max(lengths))
        # Real tokens first, in their order; what lies behind them is masked.
        columns = mask.argsort(stable=True, dim=1, descending=True)
        here = slice(self._count, self._count + len(prompts))
        for layer, own in zip(cast(Any, known).layers, self._layers, strict=True):
            own.put(here.start, *(_taken(part, columns) for part in (layer.keys, layer.values)))
        self.ids[here] = likeliest(logits[:, -1])
        self.position[here] = torch.tensor(lengths, device=self.position.device)
        self._index[here] = torch.tensor(owners, device=self._index.device)
        if self._mix is not None and mix is not None:
            self._mix[here] = mix.to(self._mix)
        self._count = here.stop

    def step(self, lengths: Sequence[int]) -> None:
        """The next token of each row, whose texts have so many tokens in their slots, under the adapters that are
        attached."""
        self.width = max(lengths) + 1
        self._step(self._count, padded=min(lengths) < max(lengths))

    def keep(self, kept: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """These rows alone; the last of them move into the slots of those that go. Returns which row each slot has.

        Args:
            lengths: of the text of each row.
        """
        order = [*range(len(kept))]
        targets = sorted({*order}.difference(kept))
        sources = [row for row in kept if row >= len(kept)]
        if targets:
            ends, begins = (torch.tensor(indices, device=self.numbers.device) for indices in (targets, sources))
            for layer in self._layers:
                layer.move(begins, ends, max(lengths[row] for row in sources))
            for own in (self.ids, self.position, self._index, self._mix):
                if own is not None:
                    own[ends] = own[begins]
        for target, source in zip(targets, sources, strict=True):
            order[target] = source
        self._count = len(kept)
        return order

    def release(self) -> None:
        """Give back keys, values and graphs now. Layers know these slots and the other way round, so they would stay
        until Python looks for such circles."""
        self._layers.clear()
        self._cache.layers = []
        self._recorder = None

    def replay(self, longest: int) -> None:
        """A step over all slots, in a width of the grid; in what is not in use it means nothing.

        Args:
            longest: tokens that a slot in use holds.
        """
        assert self._recorder and self._captures
        self.width = min(self._columns, rounded(longest + 1, 1, WIDTH))
        self._recorder.run(self.width, self._whole_step)
        self._captures.answers = not self._recorder.why

    def _whole_step(self) -> None:
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a graph must make its own casts
        try:
            with (
                attending(self._base.model, NAME, attend),
                self._bank.attached(self._index, mix=self._mix, below={}),
            ):
                self._step(self._most, padded=True, more={BIAS: self._bias()})
        finally:
            torch.set_autocast_cache_enabled(cached)
        self.position.clamp_(max=self._columns - 1)

    def _bias(self) -> Tensor:
        """(S, 1, 1, C) in float32 at least: 0 of what a row's token sees, else minus infinity."""
        seen = torch.arange(self.width, device=self.position.device) <= self.position[:, None]
        dtype = torch.promote_types(self._base.model.dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=seen.device).where(seen, -torch.inf)[:, None, None]

    def _step(self, count: int, *, padded: bool, more: Mapping[str, Any] | None = None) -> None:
        """One token of each of the first slots.

        Args:
            more: what the base's layers are given besides.
        """
        positions = self.position[:count, None]
        mask = (torch.arange(self.width, device=positions.device) <= positions).long()
        ids = self.ids[:count].clamp(min=0)
        logits, _ = forward(
            self._base, ids, mask, self._cache, keep=1, padded=padded, positions=positions, more=more
        )  # fmt: skip
        self.ids[:count] = likeliest(logits[:, -1])
        self.position[:count] += 1


class SlotBatch(RunningBatch):
    """Answers that are written in slots. One that has ended keeps its slot until prompts need it, or until a step that
    is not captured would compute it again.

    Args:
        columns: tokens that the longest text may get.
        captures: steps in slots are captured; None: they run as they are written.
        fuses: whether elementwise work is computed `fused`.
    """

    def __init__(
        self, base: Base, bank: AdapterBank, most: int, columns: int, captures: Captures | None = None,
        fuses: bool = False,
    ):  # fmt: skip
        super().__init__(base, bank, most)
        self._fuses, self._memory = fuses, Slots(base, bank, most, columns, captures)
        self._attached = ExitStack()  # the bank
        self._of: Sequence[LiveAnswer] | None = None  # for these rows
        # Free slots before prompts are read; captured steps cost the same.
        self._enough = max(1, most // (4 if self._memory.captured else 8))

    @property
    def size(self) -> int:
        return sum(not row.ended for row in self._rows)

    def takes(self, waiting: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        """Few of many in one pass: with padding the last ones would cost as much as the first."""
        free = self._most - self.size
        if not waiting or (self.size and free < self._enough):
            return []
        budget = budget_and_overhead(self._base.device)[0]
        return list(waiting[: min(free, max(1, self._most // 4, budget // len(waiting[0].text)))])

    def read(self, new: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        self._close_up()
        self._attach(new)
        self._memory.read([row.text for row in new], [row.row for row in new], mix_of(new))
        first, self._rows = len(self._rows), [*self._rows, *new]
        return self._hear(first, self._memory.ids[first : len(self._rows)])

    def step(self) -> list[LiveAnswer]:
        if self._memory.captured and not self._bank.beneath([row.row for row in self._rows]):
            self._attach(None)
            with fused(self._base.model) if self._fuses else nullcontext():
                self._memory.replay(max(len(row.text) for row in self._rows if not row.ended) - 1)
        else:
            self._close_up()
            self._attach(self._rows)
            self._memory.step([len(row.text) - 1 for row in self._rows])
        return self._hear(0, self._memory.ids[: len(self._rows)])

    def close(self) -> None:
        self._attached.close()
        self._memory.release()

    def _close_up(self) -> None:
        """Only rows that have not ended, which then are the first ones."""
        if self.size < len(self._rows):
            kept = [index for index, row in enumerate(self._rows) if not row.ended]
            order = self._memory.keep(kept, [len(row.text) - 1 for row in self._rows])
            self._rows = [self._rows[index] for index in order]

    def _attach(self, rows: Sequence[LiveAnswer] | None) -> None:
        """The adapters of these rows, or none, until it is called for others."""
        if rows is not self._of:
            self._attached.close()
            self._of = None
            if rows is not None:
                self._attached.enter_context(fused(self._base.model) if self._fuses else nullcontext())
                index = torch.tensor([row.row for row in rows])
                self._attached.enter_context(self._bank.attached(index, mix=mix_of(rows)))
            self._of = rows

    def _leave(self, rows: list[int]) -> None:
        """They keep their slots: see `_close_up`."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention of one token of each row, which sees what `BIAS` lets it see of its row: (S, 1, H, D).
    Keys that several heads share are not copied for each of them, as masks would make transformers do.

    Args:
        query: (S, H, 1, D).
        key, value: (S, G, C, D), each for H / G heads.
    """
    rows, heads, _, size = query.shape
    shared = key.shape[1]
    scores = query.reshape(rows, shared, heads // shared, size) @ key.mT  # (S, G, H / G, C)
    scores = torch.add(more[BIAS], scores, alpha=size**-0.5 if scaling is None else scaling)
    attended = scores.softmax(-1).to(value.dtype) @ value
    return attended.reshape(rows, 1, heads, size), None


def _taken(part: Tensor, columns: Tensor) -> Tensor:
    """(N, H, T, D): of each row these columns (N, T)."""
    return part.gather(2, columns.to(part.device)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
