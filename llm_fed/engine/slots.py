"""Answers in slots: static memory for the keys and values of some rows, in which an answer that ends makes room for the
next prompt.

A row lies in its slot from the first column on and writes each token where its own text ends; what lies behind is
masked. So no step copies what is known already, and a step can be captured over all slots and a width of a grid.

Shape letters: N rows, T tokens with padding, S slots, C columns of each, H heads, D numbers of a head, V vocabulary, E
experts.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from llm_fed.basics.errors import RunError
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.capture import Captures, Graphs, Replay
from llm_fed.engine.end_to_end import attending
from llm_fed.engine.fused import fused
from llm_fed.engine.masks import known_masks
from llm_fed.engine.memory import budget_and_overhead, out_of_memory
from llm_fed.engine.packing import rounded
from llm_fed.models.base import Base
from llm_fed.models.prompt import stop_tokens
from llm_fed.models.rotary import regimes

# Whose rows were compared with the same rows alone in slots (tests/engine/test_slots.py).
FAMILIES = frozenset(("llama", "mistral", "qwen2", "qwen3"))
NAME, BIAS = "llm_fed_slots", "slots_bias"  # of the attention, and of what it is given, among those of transformers
NOT_A_NUMBER = -1  # instead of a token
WIDTH, COLUMNS = 256, 64  # to which a captured step's columns are rounded up, so that few are captured; and memory's


def allowed(base: Base) -> bool:
    """Whether answers of this base may be written in slots: all layers see all tokens of a row, wherever it lies."""
    config = base.model.config
    if config.model_type not in FAMILIES or regimes(base.model) is not None:
        return False
    if len(set(getattr(base.model, "hf_device_map", {}).values())) > 1:
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


def likeliest(logits: Tensor) -> Tensor:
    """(N, 1): the likeliest token of each row (N, V); NOT_A_NUMBER where any logit is none."""
    best, ids = logits.max(-1, keepdim=True)
    return torch.where(best.isnan(), NOT_A_NUMBER, ids)


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
        experts: E, where the gate of the bank's structure is `mix`.
    """

    def __init__(
        self,
        base: Base,
        bank: AdapterBank,
        most: int,
        columns: int,
        captures: Captures | None,
        experts: int,
    ):
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
        self._mix = torch.zeros(most, experts, device=device, dtype=bank.rows.dtype) if experts else None
        self._graphs = captures.graphs(device) if captures else Graphs()
        self._replays, self._warm = dict[int, Replay](), set[int]()  # by width

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
        self._replays.clear()

    def replay(self, longest: int) -> None:
        """A step over all slots, in a width of the grid; in what is not in use it means nothing.

        Args:
            longest: tokens that a slot in use holds.
        """
        self.width = width = min(self._columns, rounded(longest + 1, 1, WIDTH))
        if width in self._warm and width not in self._replays and self.captured:
            self._capture(width)
        if width in self._replays:
            self._replays[width]()
        elif width not in self._warm:  # a step is taken so often that it is captured when it comes again
            self._warm.add(width)
            self._graphs.warm(self._whole_step)
        else:
            self._whole_step()

    def _capture(self, width: int) -> None:
        assert self._captures is not None
        try:
            self._replays[width] = self._graphs.capture(self._whole_step)
        except Exception as error:
            if out_of_memory(error):
                raise
            self._captures.answers = False
            text = " ".join(str(error).split())[:200]
            self._captures.say(f"answers are not captured, as what they call does not allow it: {text}")

    def _whole_step(self) -> None:
        cached, cast = torch.is_autocast_cache_enabled(), None if self._bank.structure.dora else self._base.autocast
        torch.set_autocast_cache_enabled(False)  # a graph must make its own casts
        try:
            with (
                attending(self._base.model, NAME, attend),
                self._bank.attached(self._index, mix=self._mix, below={}, cast=cast),
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


@dataclass(eq=False)
class SlotAnswer:
    """An answer that waits or is being written.

    Attributes:
        key: what the caller calls it.
        row: of the bank.
        text: tokens of the prompt and of the answer so far.
        end: how many tokens the text may have.
        mix: (E,), where the gate of the bank's structure is `mix`.
    """

    key: int
    row: int
    text: list[int]
    end: int
    mix: Tensor | None
    ended: bool = False


@dataclass
class SlotBatch:
    """Answers that are written side by side, each under its own adapter. One that ends leaves, and the next prompt
    takes its place.

        with SlotBatch(base, bank, rows, columns) as batch:
            batch.submit(...)
            while batch.busy:
                for key, token in batch.step(): ...

    Attributes:
        most: rows at once.
        columns: tokens that the longest text may get.
        captures: steps in slots are captured; None: they run as they are written.
        fuses: whether elementwise work is computed `fused`.
    """

    base: Base
    bank: AdapterBank
    most: int
    columns: int
    captures: Captures | None = None
    fuses: bool = False
    _waiting: deque[SlotAnswer] = field(default_factory=deque, init=False)
    _rows: list[SlotAnswer] = field(default_factory=list, init=False)
    _attached: ExitStack | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        structure = self.bank.structure
        experts = len(structure.experts) if structure.gate == "mix" else 0
        self._memory = Slots(self.base, self.bank, self.most, self.columns, self.captures, experts)
        self._stops = stop_tokens(self.base)
        # Free slots before prompts are read; captured steps cost the same.
        self._enough = max(1, self.most // (4 if self._memory.captured else 8))

    def __enter__(self) -> SlotBatch:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._detach()
        self._memory.release()

    @property
    def busy(self) -> bool:
        return bool(self._waiting) or not all(row.ended for row in self._rows)

    def submit(self, key: int, row: int, prompt: Sequence[int], room: int, mix: Tensor | None = None) -> None:
        """A prompt to be answered under a row of the bank, with at most `room` tokens.

        Args:
            mix: (E,) the weights of experts, where the gate of the bank's structure is `mix`.
        """
        self._waiting.append(SlotAnswer(key, row, [*prompt], len(prompt) + room, mix))

    def step(self) -> list[tuple[int, int | None]]:
        """(key, token) of each answer that has got one more token, and (key, None) of each that has ended, without the
        token that ends it.

        Raises:
            RunError: the base computes NaN.
        """
        going = [row for row in self._rows if not row.ended]
        if self._waiting and (not going or self.most - len(going) >= self._enough):
            self._keep(going)
            return self._read()
        return self._write(going)

    def _read(self) -> list[tuple[int, int | None]]:
        """Prompts into free rows, and the first token of each answer."""
        new = [self._waiting.popleft() for _ in range(self._readable())]
        self._attach(new)
        self._memory.read([row.text for row in new], [row.row for row in new], self._mix(new))
        self._detach()
        first, self._rows = len(self._rows), [*self._rows, *new]
        return self._heard(first)

    def _readable(self) -> int:
        """How many prompts are read in one pass: with padding the last ones of many would cost as much as the first."""
        free = [*self._waiting][: self.most - len(self._rows)]
        budget = budget_and_overhead(self.base.device)[0]
        return min(len(free), max(1, self.most // 4, budget // len(free[0].text)))

    def _write(self, going: list[SlotAnswer]) -> list[tuple[int, int | None]]:
        """A token of each answer."""
        if self._replayable():
            self._detach()
            with fused(self.base.model) if self.fuses else nullcontext():
                self._memory.replay(max(len(row.text) for row in going) - 1)
            return self._heard(0)
        self._keep(going)
        if self._attached is None:
            self._attach(self._rows)
        self._memory.step([len(row.text) - 1 for row in self._rows])
        return self._heard(0)

    def _replayable(self) -> bool:
        return self._memory.captured and not self.bank.beneath([row.row for row in self._rows])

    def _keep(self, going: list[SlotAnswer]) -> None:
        """Only these rows, which then are the first ones."""
        if len(going) < len(self._rows):
            self._detach()
            kept = [index for index, row in enumerate(self._rows) if not row.ended]
            order = self._memory.keep(kept, [len(row.text) - 1 for row in self._rows])
            self._rows = [self._rows[index] for index in order]

    def _attach(self, rows: Sequence[SlotAnswer]) -> None:
        """The bank, until the rows change."""
        self._detach()
        with ExitStack() as stack:
            if self.fuses:
                stack.enter_context(fused(self.base.model))
            stack.enter_context(self.bank.attached(torch.tensor([row.row for row in rows]), mix=self._mix(rows)))
            self._attached = stack.pop_all()

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.close()
            self._attached = None

    def _mix(self, rows: Sequence[SlotAnswer]) -> Tensor | None:
        mixes = [row.mix for row in rows if row.mix is not None]
        return torch.stack(mixes) if mixes else None

    def _heard(self, first: int) -> list[tuple[int, int | None]]:
        """What rows from the first one on say."""
        said: list[tuple[int, int | None]] = []
        rows = self._rows[first:]
        for row, token in zip(rows, self._memory.ids[first : len(self._rows), 0].tolist(), strict=True):
            if row.ended:
                continue
            if token == NOT_A_NUMBER:
                raise not_a_number(self.base, len(row.text))
            if token not in self._stops:
                row.text.append(token)
                said.append((row.key, token))
            row.ended = token in self._stops or len(row.text) == row.end
            if row.ended:
                said.append((row.key, None))
        return said


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
    before = "cache_params" if "cache_params" in known else "past_key_values"  # its names until transformers 5.23
    name = "cache" if "cache" in known else before
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


def not_a_number(base: Base, length: int) -> RunError:
    return RunError(
        f"{base.name!r} computes NaN (not a number) for a text of {length} tokens, so its answers mean nothing; "
        "choose another base.dtype (bfloat16 or float32), or check the base for infinite weights"
    )
