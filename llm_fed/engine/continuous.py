"""Answers that come and go: a batch which takes in a prompt whenever a row is free, each row under its own adapter.

Rows lie with their last tokens in one column; what stands before a shorter text is masked. Where a layer of the base
keeps more than keys and values of all tokens, or feels padding, rows cannot join a batch that has begun: it takes in
what waits when it is empty.

Shape letters: N rows, T tokens with padding, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.slots import forward, not_a_number, pad_left, select
from llm_fed.models.base import Base
from llm_fed.models.families import feels_padding
from llm_fed.models.rotary import regimes


@dataclass(frozen=True)
class Token:
    """One token of an answer, its log-probability in nats, and the likeliest at its place with theirs."""

    id: int
    logprob: float = 0.0
    likeliest: tuple[tuple[int, float], ...] = ()


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
        likeliest: how many alternatives are wanted of each token; None: no log-probabilities at all.
        stopped: nobody listens any more.
    """

    row: int
    text: list[int]
    room: int
    stops: set[int]
    heard: Callable[[Token | Exception | None], None]
    mix: Tensor | None = None
    choose: Callable[[Tensor], Tensor] | None = None
    likeliest: int | None = None
    stopped: bool = field(default=False)


class RunningBatch:
    """The rows that are being written under the adapters of one bank."""

    def __init__(self, base: Base, bank: AdapterBank, most: int):
        """`most` rows at a time."""
        self._base, self._bank, self._most = base, bank, most
        self._rows: list[LiveAnswer] = []
        self._mask = self._ids = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Cache | None = None
        rotary = regimes(base.model)
        self._border = rotary.border if rotary is not None and rotary.read_again else None
        self._even = feels_padding(base.model.config)
        plain = all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.model.config).layers)
        spread = len(set(getattr(base.model, "hf_device_map", {}).values())) > 1
        self.joins = plain and rotary is None and not self._even and not spread

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
        tokens = self._chosen(new, logits)
        self._ids = torch.cat([self._ids, tokens]) if before else tokens
        return self._hear(len(before), logits)

    @torch.inference_mode()
    def step(self) -> list[LiveAnswer]:
        """The next token of every row; those that leave to be read again, as they grow beyond what the base's positions
        were computed for."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(self.size, 1)], dim=1)
        logits, self._cache = self._forward(self._rows, self._ids, self._mask, self._cache)
        self._ids = self._chosen(self._rows, logits)
        return self._hear(0, logits)

    def fail(self, error: Exception) -> None:
        """End all answers, which hear why."""
        for each in self._rows:
            each.heard(error)
        self._rows, self._cache = [], None

    def _forward(
        self, rows: Sequence[LiveAnswer], ids: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        mixes = [each.mix for each in rows if each.mix is not None]
        index, padded = torch.tensor([each.row for each in rows]), not bool(mask.all())
        with self._bank.attached(index, mix=torch.cat(mixes) if mixes else None):
            logits, known = forward(self._base, ids, mask, cache, keep=1, padded=padded)
        return logits[:, -1], known

    def _chosen(self, rows: Sequence[LiveAnswer], logits: Tensor) -> Tensor:
        """(N, 1): the next token of each row, of logits (N, V)."""
        if logits.isnan().any():
            raise not_a_number(self._base, max(len(each.text) for each in rows))
        ids = logits.argmax(-1, keepdim=True)
        for n, each in enumerate(rows):
            if each.choose is not None:
                ids[n] = each.choose(logits[n : n + 1])[0]
        return ids

    def _hear(self, first: int, logits: Tensor) -> list[LiveAnswer]:
        """Tell of the tokens of the rows from `first` on, whose logits these are (N, V), and let rows go; those that
        are to be read again."""
        again, gone = [], set()
        for n, token in enumerate(self._ids[first:, 0].tolist()):
            each = self._rows[first + n]
            if going := token not in each.stops and not each.stopped:
                each.text.append(token)
                each.room -= 1
                each.heard(_told(token, logits[n], each.likeliest))
            if not going or each.room < 1:
                each.heard(None)
                gone.add(first + n)
            elif self._border is not None and len(each.text) == self._border + 1:
                again.append(each)
                gone.add(first + n)
        if gone:
            self._keep([n for n in range(self.size) if n not in gone])
        return again

    def _keep(self, rows: list[int]) -> None:
        self._rows = [self._rows[n] for n in rows]
        if not rows:
            self._cache = None
            return
        indices = torch.tensor(rows, device=self._ids.device)
        select(self._cache, indices)
        self._ids, self._mask = self._ids[indices], self._mask[indices]
        if self.joins and (start := int(self._mask.argmax(1).min())):  # columns that no row needs any more
            self._mask = self._mask[:, start:]
            for layer in _layers(self._cache):
                layer.keys, layer.values = layer.keys[:, :, start:], layer.values[:, :, start:]


class RowPrompt(NamedTuple):
    """What is to be answered.

    Attributes:
        key: what the caller calls it.
        row: of the bank.
        mix: (E,), where the gate of the bank's structure is `mix`.
    """

    key: int
    row: int
    tokens: Sequence[int]
    room: int
    mix: Tensor | None = None


def in_turn(
    batch: RunningBatch,
    prompts: Sequence[RowPrompt],
    stops: set[int],
    choose: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[tuple[int, int | None]]:
    """(key, token) of each further token of an answer, and (key, None) at its end, as they become known."""
    said: list[tuple[int, int | None]] = []

    def heard(key: int, token: Token | Exception | None) -> None:
        said.append((key, token.id if isinstance(token, Token) else None))

    waiting = [
        LiveAnswer(
            each.row, [*each.tokens], each.room, stops, partial(heard, each.key),
            mix=None if each.mix is None else each.mix[None], choose=choose,
        )
        for each in prompts
    ]  # fmt: skip
    while waiting or batch.size:
        waiting[:0] = batch.step() if batch.size else []
        if new := batch.takes(waiting):
            waiting = [each for each in waiting if each not in new]
            waiting[:0] = batch.read(new)
        yield from said
        said.clear()


def _told(token: int, logits: Tensor, wanted: int | None) -> Token:
    """A token with what a listener wants to know of its logits (V,)."""
    if wanted is None:
        return Token(token)
    known = logits.float().log_softmax(-1)
    values, ids = known.topk(wanted)
    return Token(token, float(known[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


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
