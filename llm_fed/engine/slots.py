"""Answers in slots: static memory for the keys and values of some rows, in which an answer that ends makes room for the
next prompt. So no step copies what is known already, and a batch does not run on for its longest answer.

A row lies in its slot from the first column on, and writes each token where its own text ends. What lies behind is
masked. With graphs a step runs over all slots and over a width of a grid, so that it can be captured.

Shape letters: S slots, n of them in use, C columns of each, H heads, D numbers of a head, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from llm_fed.engine import reading
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.batch_limits import SMALL
from llm_fed.engine.capture import Captures, Graphs, Replay
from llm_fed.engine.end_to_end import attending
from llm_fed.engine.fused import fused
from llm_fed.engine.memory import budget_and_overhead, out_of_memory
from llm_fed.engine.packing import rounded
from llm_fed.engine.prefixes import PromptRequest
from llm_fed.models.base import Base
from llm_fed.models.rotary import regimes

# Whose rows were compared with the same rows alone in slots (tests/engine/test_slots.py).
FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3"))
NAME, BIAS = "llm_fed_slots", "slots_bias"  # of the attention, and of what it is given, among those of transformers
NOT_A_NUMBER = -1  # in the place of a token
WIDTH, COLUMNS = 256, 64  # to which a captured step's columns are rounded up, so that few are captured; and memory's


def allowed(base: Base) -> bool:
    """Whether answers of this base may be written in slots: all layers see all tokens of a row, wherever it lies."""
    config = base.model.config
    if config.model_type not in FAMILIES or regimes(base.model) is not None:
        return False
    if len(set(getattr(base.model, "hf_device_map", {}).values())) > 1:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


@dataclass
class OpenAnswer:
    """An answer that is being written.

    Attributes:
        place: of the request.
        prompt: its tokens.
        tokens: of the answer so far; the last one is not in the slot yet.
        ended: the slot is free, and what it holds means nothing.
    """

    place: int
    prompt: int
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def length(self) -> int:
        """Tokens that are in the slot."""
        return self.prompt + max(0, len(self.tokens) - 1)


class SlotLayer(DynamicLayer):
    """Keys and values (S, H, C, D) of one layer."""

    keys: Any
    values: Any

    def __init__(self, slots: Slots):
        super().__init__()
        self._slots = slots

    def put(self, at: int, keys: Tensor, values: Tensor) -> None:
        """Rows (N, H, T, D) into the slots from `at` on."""
        for own, part in self._beside(keys, values):
            own[at : at + len(part), :, : part.shape[2]] = part

    def place(self, slots: Tensor, columns: Tensor, keys: Tensor, values: Tensor) -> None:
        """Tokens (1, H, T, D) into a column of a slot each."""
        for own, part in self._beside(keys, values):
            own[slots, :, columns] = part[0].transpose(0, 1)

    def _beside(self, keys: Tensor, values: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The memory of keys and of values, each with what belongs there."""
        if not self.is_initialized:
            self.keys, self.values = (self._slots.memory(part) for part in (keys, values))
            self.is_initialized = True
        return (self.keys, keys), (self.values, values)

    def move(self, sources: Tensor, targets: Tensor, length: int) -> None:
        """The first columns of some slots into others."""
        for own in (self.keys, self.values):
            own[targets, :, :length] = own[sources, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **more: Any) -> tuple[Tensor, Tensor]:
        rows, width = len(key_states), self._slots.width
        places, columns = self._slots.numbers[:rows], self._slots.position[:rows]
        for own, part in ((self.keys, key_states), (self.values, value_states)):
            own[places, :, columns] = part[:, :, 0].to(own.dtype)  # autocast may compute keys in another one
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def get_seq_length(self) -> int:
        return self._slots.width - 1


class Slots:
    """Some slots, and the answers to some prompts that are written there.

    Args:
        most: S.
        rooms: most tokens of each answer.
        stops: tokens that end an answer.
        mix: (requests, E), where the gate of the bank's structure is `mix`.
        captures: steps are captured; None: they run as they are written.
        fuses: whether steps compute elementwise work `fused`.
        end_to_end: prompts are read without padding; then none have a beginning that they share.
    """

    def __init__(
        self,
        base: Base,
        bank: AdapterBank,
        requests: Sequence[PromptRequest],
        most: int,
        *,
        rooms: Sequence[int],
        stops: Set[int],
        mix: Tensor | None = None,
        captures: Captures | None = None,
        fuses: bool = False,
        end_to_end: bool = False,
    ):
        self._base, self._bank, self._requests, self._mix = base, bank, requests, mix
        self._end_to_end = end_to_end
        self._rooms, self._stops = rooms, stops
        columns = max(len(prompt) + room for (_, prompt), room in zip(requests, rooms, strict=True))
        device = base.model.device
        self._most, self._columns = most, rounded(columns, 8, COLUMNS) if captures else columns
        self._rows: list[OpenAnswer] = []  # of the first slots; those behind are free
        self._cache: Cache = DynamicCache(config=base.model.config)
        self._layers = [SlotLayer(self) for _ in self._cache.layers]
        self._cache.layers = [*self._layers]
        self.width = 0
        self.numbers = torch.arange(most, device=device)
        self.position = torch.zeros(most, dtype=torch.int64, device=device)  # of the token that is read next
        self._ids = torch.zeros(most, 1, dtype=torch.int64, device=device)
        self._index = torch.zeros(most, dtype=torch.int64, device=device)
        self._weights = None if mix is None else torch.zeros(most, mix.shape[1], dtype=mix.dtype, device=device)
        self._captures, self._fuses = captures, fuses
        self._graphs = captures.graphs(device) if captures else Graphs()
        self._replays, self._warm = dict[int, Replay](), set[int]()  # by width

    def memory(self, like: Tensor) -> Tensor:
        """(S, H, C, D), of numbers, as what is masked is multiplied by zero."""
        return like.new_zeros(self._most, like.shape[1], self._columns, like.shape[3])

    def answers(self, order: Sequence[int], shared: Mapping[int, int]) -> Iterator[tuple[int, list[int]]]:
        """(place of the request, tokens) of each answer as it ends, without the token that ends it.

        Args:
            order: places of the requests that are answered.
            shared: tokens that all prompts of a row of the bank begin with.
        """
        waiting = deque(order)
        enough = max(1, self._most // (8 if self._captures is None else 4))  # free slots; captured steps cost the same
        try:
            while waiting or self._rows:
                while waiting and (not self._rows or self._most - len(self._rows) >= enough):
                    count = self._readable(waiting)
                    yield from self._read([waiting.popleft() for _ in range(count)], shared)
                if self._rows:
                    yield from self._write(enough if waiting else self._most)
        finally:
            self._release()

    def _release(self) -> None:
        """Give back keys, values and graphs now. Layers know these slots and the other way round, so they would stay
        until Python looks for such circles."""
        self._layers.clear()
        self._cache.layers = []
        self._replays.clear()

    def _readable(self, waiting: Iterable[int]) -> int:
        """How many prompts are read in one pass. Without padding more tokens are, which take less memory than training
        does; with padding the last ones would cost as much as the first one."""
        budget, free = budget_and_overhead(self._base.device)[0], self._most - len(self._rows)
        lengths = [len(self._requests[i][1]) for i in islice(waiting, free)]
        if not self._end_to_end:
            return min(len(lengths), max(1, self._most // 4, budget // lengths[0]))
        return max(1, sum(end <= SMALL * budget for end in accumulate(lengths)))

    def _read(self, chosen: Sequence[int], shared: Mapping[int, int]) -> Iterator[tuple[int, list[int]]]:
        """Prompts into free slots, and the first token of each answer."""
        flat = self._end_to_end and not self._bank.beneath([self._requests[i][0] for i in chosen])
        if flat:
            chosen = sorted(chosen, key=lambda i: self._requests[i][0])
        batch, at = [self._requests[i] for i in chosen], len(self._rows)
        owners, lengths = [row for row, _ in batch], [len(prompt) for _, prompt in batch]
        weights = None if self._mix is None else self._mix[list(chosen)]
        with fused(self._base.model) if self._fuses else nullcontext():
            read = self._end_to_end_into if flat else partial(self._side_by_side_into, shared=shared)
            logits = read(at, batch, weights)
        here = slice(at, at + len(batch))
        self._ids[here] = _likeliest(logits)
        self.position[here] = torch.tensor(lengths, device=self.position.device)
        self._index[here] = torch.tensor(owners, device=self._index.device)
        if self._weights is not None and weights is not None:
            self._weights[here] = weights.to(self._weights.device)
        self._rows += [OpenAnswer(i, length) for i, length in zip(chosen, lengths, strict=True)]
        yield from self._heard(at, self._ids[here, 0].tolist())
        self._close_up()

    def _end_to_end_into(self, at: int, batch: Sequence[PromptRequest], weights: Tensor | None) -> Tensor:
        """Prompts into the slots from `at` on, and the logits (N, 1, V) behind each."""
        logits, known, flat = reading.end_to_end(self._base, self._bank, batch, weights)
        columns, borders = flat.positions[0], flat.sequences.borders.long()
        rows = torch.repeat_interleave(self.numbers[at : at + len(batch)], borders.diff(), output_size=len(columns))
        layers: Sequence[Any] = known.layers
        for layer, own in zip(layers, self._layers, strict=True):
            own.place(rows, columns, layer.keys, layer.values)
        return logits

    def _side_by_side_into(
        self, at: int, batch: Sequence[PromptRequest], weights: Tensor | None, shared: Mapping[int, int]
    ) -> Tensor:
        """The same with padding."""
        lengths = [len(prompt) for _, prompt in batch]
        ids, mask, cache = reading.begin(self._base, self._bank, batch, shared)
        with self._bank.attached(torch.tensor([row for row, _ in batch]), mix=weights):
            padded = min(lengths) < mask.shape[1]
            logits, known = reading.forward(self._base, ids, mask, cache, keep=1, padded=padded)
        # Real tokens first, in their order; what lies behind them is masked.
        columns = mask.argsort(stable=True, dim=1, descending=True)[:, : max(lengths)]
        layers: Sequence[Any] = known.layers
        for layer, own in zip(layers, self._layers, strict=True):
            own.put(at, *(_taken(part, columns) for part in (layer.keys, layer.values)))
        return logits

    def _write(self, wanted: int) -> Iterator[tuple[int, list[int]]]:
        """Steps until an answer ends, or so many slots are free where steps are captured, as they cost the same."""
        count = len(self._rows)
        owners = [self._requests[row.place][0] for row in self._rows]
        if self._captures is not None and not self._bank.beneath(owners):
            while self._captures.answers and (left := self._open()) > 0 and self._most - left < wanted:
                self._replay(self._captures)
                yield from self._heard(0, self._ids[:count, 0].tolist())
        if self._open() == count:
            weights = None if self._weights is None else self._weights[:count]
            with self._bank.attached(torch.tensor(owners), mix=weights):
                while self._open() == count:
                    lengths = [row.length for row in self._rows]
                    self.width = max(lengths) + 1
                    self._step(count, padded=min(lengths) < max(lengths))
                    yield from self._heard(0, self._ids[:count, 0].tolist())
        self._close_up()

    def _open(self) -> int:
        """How many answers are being written."""
        return sum(not row.ended for row in self._rows)

    def _heard(self, first: int, tokens: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """What rows from the slot `first` on say next; the answers that end with it."""
        for row, token in zip(self._rows[first:], tokens, strict=True):
            if row.ended:
                continue
            if token == NOT_A_NUMBER:
                raise reading.not_a_number(self._base, row.length + bool(row.tokens))
            if token not in self._stops:
                row.tokens.append(token)
            if token in self._stops or len(row.tokens) == self._rooms[row.place]:
                row.ended = True
                yield row.place, row.tokens

    def _close_up(self) -> None:
        """The last rows into the slots of those that have ended, so that the rest are free."""
        count = self._open()
        targets = [n for n, row in enumerate(self._rows[:count]) if row.ended]
        sources = [n for n, row in enumerate(self._rows) if n >= count and not row.ended]
        if targets:
            length = max(self._rows[n].length for n in sources)
            ends, begins = (torch.tensor(places, device=self.numbers.device) for places in (targets, sources))
            for layer in self._layers:
                layer.move(begins, ends, length)
            for own in (self._ids, self.position, self._index, self._weights):
                if own is not None:
                    own[ends] = own[begins]
        for target, source in zip(targets, sources, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[count:]

    def _replay(self, captures: Captures) -> None:
        """A step over all slots, in a width of the grid; in what is not in use it means nothing."""
        needed = max(row.length for row in self._rows if not row.ended) + 1
        self.width = width = min(self._columns, rounded(needed, 1, WIDTH))
        if width in self._warm and width not in self._replays and captures.answers:
            self._capture(width, captures)
        if width in self._replays:
            self._replays[width]()
        elif width not in self._warm:  # a step is taken so often that it is captured when it comes again
            self._warm.add(width)
            self._graphs.warm(self._whole_step)
        else:
            self._whole_step()

    def _capture(self, width: int, captures: Captures) -> None:
        try:
            self._replays[width] = self._graphs.capture(self._whole_step)
        except Exception as error:
            if out_of_memory(error):
                raise
            captures.answers = False
            text = " ".join(str(error).split())[:200]
            captures.say(f"answers are not captured, as what they call does not allow it: {text}")

    def _whole_step(self) -> None:
        cached, cast = torch.is_autocast_cache_enabled(), None if self._bank.structure.dora else self._base.autocast
        torch.set_autocast_cache_enabled(False)  # a graph must make its own casts
        try:
            with (
                fused(self._base.model) if self._fuses else nullcontext(),
                attending(self._base.model, NAME, attend),
                self._bank.attached(self._index, mix=self._weights, below={}, cast=cast),
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
        ids = self._ids[:count].clamp(min=0)
        logits, _ = reading.forward(
            self._base, ids, mask, self._cache, keep=1, padded=padded, positions=positions, more=more
        )  # fmt: skip
        self._ids[:count] = _likeliest(logits)
        self.position[:count] += 1


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


def _likeliest(logits: Tensor) -> Tensor:
    """(N, 1): the likeliest token of each row; NOT_A_NUMBER where any logit is none."""
    best, ids = logits[:, -1].max(-1, keepdim=True)
    return torch.where(best.isnan(), NOT_A_NUMBER, ids)


def _taken(part: Tensor, columns: Tensor) -> Tensor:
    """(N, H, T, D): of each row these columns (N, T)."""
    return part.gather(2, columns.to(part.device)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]))
