"""Micro-batches: which examples of a step go through the model side by side, so that little is padding.

Shape letters: N rows, T tokens, n target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

MOST = 1023  # examples that lie end to end: torch's products by group take so many groups, each of one client at least


class TokenSequence(Protocol):
    """One sequence; target[t]: whether predicting token t counts in the loss (the first token never does)."""

    @property
    def input_ids(self) -> Sequence[int]: ...

    @property
    def target(self) -> Sequence[bool]: ...


@dataclass(frozen=True)
class Grid:
    """The few shapes to which micro-batches are rounded up, so that what was captured for one fits many. `longest`:
    most tokens of a row that the model has positions for; None: any number."""

    longest: int | None = None

    def rows(self, count: int) -> int:
        return rounded(count, 2, 1)

    def tokens(self, length: int) -> int:
        wide = rounded(length, 4, 8)
        return wide if self.longest is None else max(length, min(wide, self.longest))

    def targets(self, count: int) -> int:
        return rounded(count, 1, 16)

    def end_to_end(self, tokens: int) -> int:
        """Of all tokens of a micro-batch without padding; they vary less than those of a row."""
        return rounded(tokens, 8, 64)

    def attended(self, length: int) -> int:
        """Of the tokens that no text without padding is longer than, which costs nothing."""
        return rounded(length, 1, 16)


def rounded(number: int, parts: int, least: int) -> int:
    """The next of so many numbers between one power of two and the next, and a multiple of `least`."""
    step = max(least, 2 ** (number.bit_length() - 1) // parts) if number else least
    return -(-number // step) * step


def plan(lengths: Sequence[int], budget: int, overhead: int, grid: Grid | None = None) -> list[list[int]]:
    """Partition examples into micro-batches of neighbouring lengths at the least cost.

    The cost of a plan is the sum of count * longest over its micro-batches, plus `overhead` for each of them.
    It is minimised exactly, by dynamic programming over the sorted lengths; equal input, equal plan.

    Args:
        lengths: tokens of each example.
        budget: most tokens, padding included, of a micro-batch. A longer example is a micro-batch of its own.
        overhead: what one more micro-batch costs, in tokens.
        grid: to whose shapes micro-batches are rounded up, which is part of their cost.

    Returns:
        Positions in `lengths`, the longest micro-batch first.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    best = np.zeros(len(order) + 1)  # best[j]: least cost of the j shortest examples
    cut = [0] * (len(order) + 1)  # where the last micro-batch of that plan begins
    rows = np.array([grid.rows(count) if grid else count for count in range(len(order) + 1)])
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        longest = grid.tokens(longest) if grid else longest
        most = int(np.searchsorted(rows, budget // longest, "right")) - 1
        begins = np.arange(max(0, end - max(1, most)), end)
        costs = best[begins] + rows[end - begins] * longest + overhead
        chosen = int(costs.argmin())
        best[end], cut[end] = costs[chosen], int(begins[chosen])
    batches, end = [], len(order)
    while end:
        batches.append(order[cut[end] : end])
        end = cut[end]
    return batches


def filled(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Partition examples into stretches of about equally many tokens, as few as the budget and MOST allow, in their
    order: positions in `lengths`. `budget`: most tokens of a stretch. A longer example is one of its own."""
    total = sum(lengths)
    each = total / max(1, -(-total // budget))  # tokens of a stretch, were examples divisible
    batches, held, so_far = list[list[int]](), 0, 0
    for index, length in enumerate(lengths):
        full = not batches or held + length > budget or len(batches[-1]) == MOST
        if full or so_far + length / 2 > each * len(batches):
            batches.append([])
            held = 0
        batches[-1].append(index)
        held, so_far = held + length, so_far + length
    return batches


def divided(
    lengths: Sequence[int], budget: int, overhead: int, grid: Grid | None = None, *, flat: bool = False
) -> tuple[list[list[int]], int]:
    """The micro-batches of examples of these lengths, side by side or end to end (`flat`), and the tokens that they
    hold, padding included. Arguments as of `plan`."""
    batches, padded = filled(lengths, budget) if flat else plan(lengths, budget, overhead, grid), 0
    for own in ([lengths[i] for i in batch] for batch in batches):
        if flat:
            padded += grid.end_to_end(sum(own)) if grid else sum(own)
        else:
            padded += grid.rows(len(own)) * grid.tokens(max(own)) if grid else len(own) * max(own)
    return batches, padded


@dataclass(frozen=True)
class MicroBatch:
    """Examples side by side, padded on the right; on the CPU."""

    input_ids: Tensor  # (N, T)
    labels: Tensor  # (n,) the target tokens
    rows: Tensor  # (n,) the row of each
    indices: Tensor  # (n,) where in (N * T) stands the token that predicts each
    lengths: Tensor  # (N,) tokens of each row


def collate(examples: Sequence[TokenSequence]) -> MicroBatch:
    """Put examples side by side."""
    input_ids = pad_sequence([torch.tensor(example.input_ids) for example in examples], batch_first=True)
    target = pad_sequence([torch.tensor(example.target) for example in examples], batch_first=True)
    rows, columns = target[:, 1:].nonzero(as_tuple=True)  # nothing predicts the first token
    indices = rows * input_ids.shape[1] + columns
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    return MicroBatch(input_ids, input_ids.flatten()[indices + 1], rows, indices, lengths)


def widened(batch: MicroBatch, grid: Grid) -> MicroBatch:
    """The batch in a shape of the grid. Further rows and targets repeat the last one: so they hold nothing that is not
    finite where the last one does not, and where the weights of these targets are 0, they change no gradient."""
    (rows, tokens), targets = batch.input_ids.shape, len(batch.labels)
    wide = grid.tokens(tokens)
    ids = torch.nn.functional.pad(batch.input_ids, (0, wide - tokens))
    indices = batch.indices + batch.rows * (wide - tokens)
    more, later = grid.rows(rows), grid.targets(targets)
    return MicroBatch(
        repeated(ids, more), repeated(batch.labels, later), repeated(batch.rows, later), repeated(indices, later),
        repeated(batch.lengths, more),
    )  # fmt: skip


def repeated(tensor: Tensor, size: int) -> Tensor:
    """The rows of a tensor, and so often the last one that there are `size`."""
    more = size - len(tensor)
    return torch.cat([tensor, tensor[-1:].expand(more, *tensor.shape[1:])]) if more else tensor


def num_targets(examples: Sequence[TokenSequence]) -> int:
    """How many tokens of the examples count in the loss."""
    return sum(sum(example.target[1:]) for example in examples)
