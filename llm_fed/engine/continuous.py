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
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, EncoderDecoderCache

from llm_fed.basics.errors import RunError, UserError
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.masks import known_masks
from llm_fed.engine.memory import budget_and_overhead, is_spread
from llm_fed.models.base import Base
from llm_fed.models.families import feels_padding
from llm_fed.models.rotary import regimes

NOT_A_NUMBER = -1  # instead of a token


@dataclass(frozen=True)
class Sampling:
    """How each token of an answer is drawn. UserError: a number is out of its range.

    Attributes:
        temperature: the logits are divided by it.
        top_p: the share of the probability of the likeliest tokens among which one is drawn (Holtzman et al. 2020).
        seed: None: each answer is another one.
    """

    temperature: float
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"the temperature of sampling is {self.temperature:g}; it is above 0, e.g. 0.7")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p of sampling is {self.top_p:g}; it is above 0 and at most 1, e.g. 0.9")

    @classmethod
    def parse(cls, text: str, key: str) -> Sampling:
        """Of `0.7`, or `0.7,0.9` with top-p. `key`: where it stands. UserError: it is neither, or out of range."""
        try:
            temperature, _, top_p = text.partition(",")
            numbers = float(temperature), float(top_p or 1)
        except ValueError:
            raise UserError(
                f"{key} is {text!r}; it takes a temperature and, after a comma, a top-p, e.g. 0.7 or 0.7,0.9"
            ) from None
        return cls(*numbers)

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}" + (f", top-p {self.top_p:g}" if self.top_p < 1 else "")

    def chooser(self, device: torch.device) -> Callable[[Tensor], Tensor]:
        """What draws the next tokens (N, 1) of one answer from logits (N, V)."""
        generator = torch.Generator(device)
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        warpers: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        warpers += [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []

        def choose(logits: Tensor) -> Tensor:
            scores = logits.float()
            for warp in warpers:
                scores = warp(None, scores)
            return torch.multinomial(scores.softmax(-1), 1, generator=generator)

        return choose


@dataclass(frozen=True)
class LogProbability:
    """Of one token of an answer, in nats, and of the likeliest tokens at its place."""

    token: int
    value: float
    likeliest: tuple[tuple[int, float], ...]


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
        likeliest: how many alternatives to each token `logprobs` has; None: no log-probabilities are computed.
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
    likeliest: int | None = None
    stopped: bool = False
    ended: bool = field(default=False, init=False)
    logprobs: list[LogProbability] = field(default_factory=list, init=False)


class KeysAndValues(Protocol):
    """What a layer keeps of all tokens, (N, H, T, D) each."""

    keys: Tensor
    values: Tensor


class RunningBatch:
    """Rows being written under the adapters of one bank, `most` at a time. `joins`: whether prompts can join them."""

    def __init__(self, base: Base, bank: AdapterBank, most: int):
        self._base, self._bank, self._most = base, bank, most
        self.rows: list[LiveAnswer] = []
        self._mask = self._ids = torch.zeros(0, 0, dtype=torch.int64)
        self._cache: Cache | None = None
        rotary = regimes(base.model)
        self._border = rotary.border if rotary is not None and rotary.read_again else None
        self._even = feels_padding(base.model.config)
        self.joins = plain(base) and not self._even
        self._enough = max(1, most // 8)  # free rows before prompts are read beside others

    def takes(self, waiting: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        """Those of the waiting answers that can be read now: few of many where others can join later, as with padding
        the last ones would cost as much as the first."""
        free = self._most - len(self.rows)
        if not waiting or (self.rows and (not self.joins or free < self._enough)):
            return []
        longest = len(waiting[0].text)
        if self.joins:
            budget = budget_and_overhead(self._base.device)[0]
            free = min(free, max(1, self._most // 4, budget // longest))
        return [each for each in waiting[:free] if not self._even or len(each.text) == longest]

    @torch.inference_mode()
    def read(self, new: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        """Take these in and write their first tokens; those that must be read again, see `step`."""
        before, self.rows = self.rows, [*self.rows, *new]  # so that all hear of it where this fails
        ids, mask = pad_left([each.text for each in new], self._base.model.device)
        logits, cache = self._forward(new, ids, mask, None)
        tokens = _chosen(new, logits)
        if before:
            width = max(self._mask.shape[1], mask.shape[1])  # the narrower one is masked on the left
            self._mask = torch.cat([F.pad(each, (width - each.shape[1], 0)) for each in (self._mask, mask)])
            self._ids = torch.cat([self._ids, tokens])
            _join(self._cache, cache)
        else:
            self._mask, self._ids, self._cache = mask, tokens, cache
        return self._hear(new, tokens[:, 0].tolist(), logits)

    @torch.inference_mode()
    def step(self) -> list[LiveAnswer]:
        """The next token of every row; those to be read again, as they outgrow what positions were computed for."""
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
        logits, self._cache = self._forward(self.rows, self._ids, self._mask, self._cache)
        self._ids = _chosen(self.rows, logits)
        return self._hear(self.rows, self._ids[:, 0].tolist(), logits)

    def fail(self, error: Exception) -> None:
        """End all answers, which hear why."""
        for each in self.rows:
            each.heard(error)
        self.close()

    def close(self) -> None:
        """Nothing is written any more."""
        self.rows, self._cache = [], None

    def _forward(
        self, rows: Sequence[LiveAnswer], ids: Tensor, mask: Tensor, cache: Cache | None
    ) -> tuple[Tensor, Cache]:
        """The logits (N, V) of the next tokens, and the cache with those that were read."""
        index, padded = torch.tensor([each.row for each in rows]), min(len(each.text) for each in rows) < mask.shape[1]
        mixes = [each.mix for each in rows if each.mix is not None]
        with self._bank.attached(index, mix=torch.cat(mixes) if mixes else None):
            logits, known = forward(self._base, ids, mask, cache, keep=1, padded=padded)
        return logits[:, -1], known

    def _hear(
        self, rows: Sequence[LiveAnswer], tokens: Sequence[int], logits: Tensor | None = None
    ) -> list[LiveAnswer]:
        """Tell of these rows' tokens, of logits (N, V), and let rows go; those to be read again. RunError: NaN."""
        again = []
        for n, (each, token) in enumerate(zip(rows, tokens, strict=True)):
            if token == NOT_A_NUMBER:
                raise not_a_number(self._base, len(each.text))
            if going := token not in each.stops and not each.stopped:
                if logits is not None and each.likeliest is not None:
                    each.logprobs.append(_log_probability(logits[n], token, each.likeliest))
                each.text.append(token)
                each.room -= 1
                each.heard(token)
            if not going or each.room < 1:
                each.ended = True
                each.heard(None)
            elif self._border is not None and len(each.text) == self._border + 1:
                again.append(each)
        kept = [n for n, each in enumerate(self.rows) if not (each.ended or each in again)]
        if len(kept) < len(self.rows):
            self._keep(kept)
        return again

    def _keep(self, kept: Sequence[int]) -> None:
        """These rows alone."""
        self.rows = [self.rows[n] for n in kept]
        indices = torch.tensor(kept, device=self._ids.device, dtype=torch.int64)
        self._ids, self._mask = self._ids[indices], self._mask[indices]
        self._cache = select(self._cache, indices) if kept else None
        if self.joins and kept:  # without columns that none needs any more
            width = max(len(each.text) for each in self.rows) - 1
            self._mask = self._mask[:, -width:]
            for layer in layers_of(self._cache):
                layer.keys, layer.values = layer.keys[:, :, -width:], layer.values[:, :, -width:]


def in_turn(batch: RunningBatch, waiting: Sequence[LiveAnswer]) -> Iterator[None]:
    """Writes answers until all have ended, a token of each after another."""
    left = [*waiting]
    while left or batch.rows:
        left[:0] = batch.step() if batch.rows else []
        if new := batch.takes(left):
            left = [each for each in left if each not in new]
            left[:0] = batch.read(new)
        yield


def plain(base: Base) -> bool:
    """Whether each layer of a base keeps keys and values of all tokens on one device, wherever a row lies."""
    if regimes(base.model) is not None or is_spread(base.model):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=base.model.config).layers)


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


def _log_probability(logits: Tensor, token: int, likeliest: int) -> LogProbability:
    """Of logits (V,)."""
    known = logits.float().log_softmax(-1)
    values, ids = known.topk(likeliest)
    return LogProbability(token, float(known[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))


def _join(cache: Cache | None, new: Cache) -> None:
    """The rows of `new` behind those of a cache, whose texts end in the same column."""
    for own, other in zip(layers_of(cache), layers_of(new), strict=True):
        width = max(own.keys.shape[2], other.keys.shape[2])
        parts = [
            [F.pad(part, (0, 0, width - part.shape[2], 0)) for part in (each.keys, each.values)]
            for each in (own, other)
        ]
        own.keys, own.values = (torch.cat(both) for both in zip(*parts, strict=True))


def layers_of(cache: Cache | None) -> Sequence[KeysAndValues]:
    """Of plain keys and values (N, H, T, D), see `RunningBatch.joins`."""
    assert cache is not None
    return cast(Sequence[KeysAndValues], cache.layers)


def forward(
    base: Base,
    ids: Tensor,
    mask: Tensor,
    cache: Cache | None,
    keep: int,
    padded: bool,
    positions: Tensor | None = None,
    more: Mapping[str, Tensor] | None = None,
) -> tuple[Tensor, Cache]:
    """Logits (N, keep, V) of the last `keep` tokens of `ids` (N, T), and the cache with all of them. `mask` covers what
    is in the cache and the new tokens; it has a zero only if `padded`. `positions` (N, T) count real tokens only. The
    base's layers are given `more`, too."""
    if positions is None:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    options = {"position_ids": positions, "logits_to_keep": keep}
    known = inspect.signature(base.model.forward).parameters  # models with ALiBi take no positions
    before = "cache_params" if "cache_params" in known else "past_key_values"  # its names until transformers 5.23
    name = "cache" if "cache" in known else before
    if isinstance(cache, Cache) and not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        # Where there are states alone, the mask is of the new tokens: Mamba multiplies these by all of it.
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
    after = output[name]  # some decoders keep room for what an encoder has read
    return output.logits[:, -keep:], after.self_attention_cache if isinstance(after, EncoderDecoderCache) else after


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
