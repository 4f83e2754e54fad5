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


class TokenSequence(Protocol):
    """One sequence; target[t]: whether predicting token t counts in the loss (the first token never does)."""

    @property
    def input_ids(self) -> Sequence[int]: ...

    @property
    def target(self) -> Sequence[bool]: ...


def plan(lengths: Sequence[int], budget: int, overhead: int) -> list[list[int]]:
    """Partition examples into micro-batches of neighbouring lengths at the least cost.

    The cost of a plan is the sum of count * longest over its micro-batches, plus `overhead` for each of them.
    It is minimised exactly, by dynamic programming over the sorted lengths; equal input, equal plan.

    Args:
        lengths: tokens of each example.
        budget: most tokens, padding included, of a micro-batch. A longer example is a micro-batch of its own.
        overhead: what one more micro-batch costs, in tokens.

    Returns:
        Positions in `lengths`, the longest micro-batch first.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    best = np.zeros(len(order) + 1)  # best[j]: least cost of the j shortest examples
    cut = [0] * (len(order) + 1)  # where the last micro-batch of that plan begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        begins = np.arange(max(0, end - max(1, budget // longest)), end)
        costs = best[begins] + (end - begins) * longest + overhead
        chosen = int(costs.argmin())
        best[end], cut[end] = costs[chosen], int(begins[chosen])
    batches, end = [], len(order)
    while end:
        batches.append(order[cut[end] : end])
        end = cut[end]
    return batches


def padded_tokens(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> int:
    """Tokens that the micro-batches hold, padding included."""
    return sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)


@dataclass(frozen=True)
class MicroBatch:
    """Examples side by side, padded on the right; on the CPU."""

    input_ids: Tensor  # (N, T)
    labels: Tensor  # (n,) the target tokens
    rows: Tensor  # (n,) the row of each
    places: Tensor  # (n,) where in (N * T) stands the token that predicts each
    lengths: Tensor  # (N,) tokens of each row


def collate(examples: Sequence[TokenSequence]) -> MicroBatch:
    """Put examples side by side."""
    input_ids = pad_sequence([torch.tensor(example.input_ids) for example in examples], batch_first=True)
    target = pad_sequence([torch.tensor(example.target) for example in examples], batch_first=True)
    rows, columns = target[:, 1:].nonzero(as_tuple=True)  # nothing predicts the first token
    places = rows * input_ids.shape[1] + columns
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    return MicroBatch(input_ids, input_ids.flatten()[places + 1], rows, places, lengths)


def num_targets(examples: Sequence[TokenSequence]) -> int:
    """How many tokens of the examples count in the loss."""
    return sum(sum(example.target[1:]) for example in examples)
