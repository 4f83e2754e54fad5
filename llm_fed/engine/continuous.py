"""Answers that come and go: a batch which takes in a prompt whenever a row is free, each row under its own adapter.

Rows lie with their last tokens in one column; what stands before a shorter text is masked. Where a layer of the base
keeps more than keys and values of all tokens, or feels padding, rows cannot join a batch that has begun: it takes in
what waits when it is empty.

Shape letters: N rows, T tokens with padding, V vocabulary, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from llm_fed.basics.errors import RunError
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.masks import known_masks
from llm_fed.engine.memory import is_spread
from llm_fed.models.base import Base
from llm_fed.models.families import feels_padding
from llm_fed.models.rotary import regimes

NOT_A_NUMBER = -1  # instead of a token


@dataclass(eq=False)
class LiveAnswer:
    """An answer that waits or is being written.

    Attributes:
        row: of the bank.
        text: the tokens of the prompt, and behind them those of the answer so far.
        room: how many tokens may still come.
        heard: is given each token as it is known; at the end None, or why there is no end.
        mix: (1, E), where the gate of the bank's structure is `mix`.
        choose: instead of the likeliest token.
        stopped: nobody listens any more.
        ended: no token may come any more.
    """

    row: int
    text: list[int]
    room: int
    stops: set[int]
    heard: Callable[[int | Exception | None], None]
    mix: Tensor | None = None
    choose: Callable[[Tensor], Tensor] | None = None
    stopped: bool = False
    ended: bool = field(default=False, init=False)


class RunningBatch:
    """The rows that are being written under the adapters of one bank, `most` at a time."""

    def __init__(self, base: Base, bank: AdapterBank, most: int):
        self._base, self._bank, self._most = base, bank, most
        self._rows: list[LiveAnswer] = []
        self._mask = self._ids = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Cache | None = None
        rotary = regimes(base.model)
        self._border = rotary.border if rotary is not None and rotary.read_again else None
        self._even = feels_padding(base.model.config)
        self.joins = plain(base) and not self._even

    @property
    def size(self) -> int:
        """How many answers are being written."""
        return len(self._rows)

    def takes(self, waiting: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        """Those of the waiting answers that can be read now."""
        if self._rows and not self.joins:
            return []
        chosen = list(waiting[: self._most - self.size])
        return [each for each in chosen if not self._even or len(each.text) == len(chosen[0].text)]

    @torch.inference_mode()
    def read(self, new: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        """Take these in and write their first tokens; those that must be read again, see `step`."""
        before, self._rows = self._rows, [*self._rows, *new]  # so that all hear of it where this fails
        ids, mask = pad_left([each.text for each in new], self._base.model.device)
        logits, cache = self._forward(new, ids, mask, None)
        if before:
            self._mask, mask = _level(self._mask, mask)
            _join(self._cache, cache)
            self._mask = torch.cat([self._mask, mask])
        else:
            self._mask, self._cache = mask, cache
        tokens = _chosen(new, logits)
        self._ids = torch.cat([self._ids, tokens]) if before else tokens
        return self._hear(len(before), tokens)

    @torch.inference_mode()
    def step(self) -> list[LiveAnswer]:
        """The next token of every row; those that leave to be read again, as they grow beyond what the base's positions
        were computed for."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.size, 1)], dim=1)
        logits, self._cache = self._forward(self._rows, self._ids, self._mask, self._cache)
        self._ids = _chosen(self._rows, logits)
        return self._hear(0, self._ids)

    def fail(self, error: Exception) -> None:
        """End all answers, which hear why."""
        for each in self._rows:
            each.heard(error)
        self.close()

    def close(self) -> None:
        """Nothing is written any more."""
        self._rows, self._cache = [], None

    def _forward(
        self, rows: Sequence[LiveAnswer], ids: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        index, padded = torch.tensor([each.row for each in rows]), not bool(mask.all())
        with self._bank.attached(index, mix=mix_of(rows)):
            logits, known = forward(self._base, ids, mask, cache, keep=1, padded=padded)
        return logits[:, -1], known

    def _hear(self, first: int, ids: Tensor) -> list[LiveAnswer]:
        """Tell of the tokens (N, 1) of the rows from `first` on, and let rows go; those that are to be read again.

        Raises:
            RunError: the base computes NaN.
        """
        again = []
        for n, token in enumerate(ids[:, 0].tolist()):
            each = self._rows[first + n]
            if each.ended:
                continue
            if token == NOT_A_NUMBER:
                raise not_a_number(self._base, len(each.text))
            if going := token not in each.stops and not each.stopped:
                each.text.append(token)
                each.room -= 1
                each.heard(token)
            if not going or each.room < 1:
                each.ended = True
                each.heard(None)
            elif self._border is not None and len(each.text) == self._border + 1:
                again.append(each)
        self._leave([n for n, each in enumerate(self._rows) if not (each.ended or each in again)])
        return again

    def _leave(self, rows: list[int]) -> None:
        """All but these rows."""
        if len(rows) < len(self._rows):
            self._rows = [self._rows[n] for n in rows]
            indices = torch.tensor(rows, device=self._ids.device, dtype=torch.int64)
            self._ids, self._mask = self._ids[indices], self._mask[indices]
            self._cache = select(self._cache, indices) if rows else None


def in_turn(batch: RunningBatch, waiting: Sequence[LiveAnswer]) -> Iterator[None]:
    """Writes answers until all have ended, a token of each after another."""
    left = [*waiting]
    while left or batch.size:
        left[:0] = batch.step() if batch.size else []
        if new := batch.takes(left):
            left = [each for each in left if each not in new]
            left[:0] = batch.read(new)
        yield


def plain(base: Base) -> bool:
    """Whether each layer of a base keeps keys and values of all tokens on one device, wherever a row lies."""
    if regimes(base.model) is not None or is_spread(base.model):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.model.config).layers)


def mix_of(rows: Sequence[LiveAnswer]) -> Tensor | None:
    """(N, E), where the gate of the bank's structure is `mix`."""
    mixes = [row.mix for row in rows if row.mix is not None]
    return torch.cat(mixes) if mixes else None


def likeliest(logits: Tensor) -> Tensor:
    """(N, 1): the likeliest token of each row (N, V); NOT_A_NUMBER where any logit is none."""
    best, ids = logits.max(-1, keepdim=True)
    return torch.where(best.isnan(), NOT_A_NUMBER, ids)


def _chosen(rows: Sequence[LiveAnswer], logits: Tensor) -> Tensor:
    """(N, 1): the next token of each row, of logits (N, V)."""
    ids = likeliest(logits)
    for n, each in enumerate(rows):
        if each.choose is not None and int(ids[n]) != NOT_A_NUMBER:
            ids[n] = each.choose(logits[n : n + 1])[0]
    return ids


def _level(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both masks (N, T) in the width of the wider one, which is masked on the left."""
    width = max(one.shape[1], other.shape[1])
    return F.pad(one, (width - one.shape[1], 0)), F.pad(other, (width - other.shape[1], 0))


def _join(cache: Cache | None, new: Cache) -> None:
    """The rows of `new` behind those of a cache, whose texts end in the same column."""
    for own, other in zip(_layers(cache), _layers(new), strict=True):
        width = max(own.keys.shape[2], other.keys.shape[2])
        parts = [
            [F.pad(part, (0, 0, width - part.shape[2], 0)) for part in (each.keys, each.values)]
            for each in (own, other)
        ]
        own.keys, own.values = (torch.cat(both) for both in zip(*parts, strict=True))


def _layers(cache: Cache | None) -> list[Any]:
    """Of plain keys and values (N, H, T, D), see `RunningBatch.joins`."""
    assert cache is not None
    return cache.layers


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


def select(cache: Cache | None, rows: Tensor) -> Cache:
    """These rows of the cache, in its place; every kind of cache can do so, as beam search needs it."""
    assert cache is not None
    cache.reorder_cache(cast(torch.LongTensor, rows))
    return cache


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
