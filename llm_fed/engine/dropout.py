"""Dropout masks that are computed where they are used, from one number for each token: none is drawn by the host, and
none is held for the backward pass, which computes it again.

The numbers are those of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): the
n-th of a stream is a mix of its seed plus n times a constant, so that it depends on nothing else. An example is a
stream of keys, one for each token, and a key a stream of words, each for the masks of four inputs.

Shape letters: N rows, T tokens, W words of a token for one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llm_fed.engine.packing import repeated

GAMMA = 0x9E3779B97F4A7C15 - 2**64  # as numbers with a sign, which overflow in the same way
ROUNDS = (30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)  # "variant 13" of the paper
LAST = 31  # bits by which the last round shifts
PER_WORD = 4  # inputs, each of 16 bits


@dataclass(frozen=True)
class MaskKeys:
    """What decides which inputs of each token are kept.

    Attributes:
        of: (N, T), int64; of sequences end to end (1, S).
    """

    of: Tensor

    def widened(self, rows: int, tokens: int) -> MaskKeys:
        """For what pads a micro-batch, some keys: its losses weigh nothing."""
        wide = torch.nn.functional.pad(self.of, (0, tokens - self.of.shape[1]))
        return MaskKeys(repeated(wide, rows))


def mask_keys(seeds: Sequence[int], lengths: Sequence[int], *, end_to_end: bool) -> MaskKeys:
    """Of examples of these lengths in tokens: each one's depend on its seed alone."""
    keys = torch.tensor(seeds)[:, None] + numbers(0, max(lengths))
    if end_to_end:
        keys = keys[torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]][None]
    return MaskKeys(_mixed(keys))


def numbers(first: int, count: int, device: torch.device | None = None) -> Tensor:
    """What is added to the seed of a stream for so many of its numbers, (count,)."""
    return torch.arange(first + 1, first + count + 1, device=device) * GAMMA


def words_of(inputs: int) -> int:
    """W of a layer with so many inputs."""
    return -(-inputs // PER_WORD)


def kept(keys: Tensor, steps: Tensor, inputs: int, below: int) -> Tensor:
    """(N, T, inputs) which inputs of a layer are kept.

    Args:
        keys: (N, T)
        steps: (W,) of `numbers`.
        below: of the values -2^15 to 2^15 - 1 those that keep an input.
    """
    words = _mixed(keys[..., None] + steps)
    return words.view(torch.int16)[..., :inputs] < below


def _mixed(state: Tensor) -> Tensor:
    """The numbers of these states, in their place."""
    for shift, factor in ROUNDS:
        state.bitwise_xor_(_shifted(state, shift)).mul_(factor)
    return state.bitwise_xor_(_shifted(state, LAST))


def _shifted(state: Tensor, bits: int) -> Tensor:
    """To the right, with zeros on the left; torch itself repeats the sign."""
    return (state >> bits).bitwise_and_(2 ** (64 - bits) - 1)


class Dropped(torch.autograd.Function):
    """Inputs x (N, T, inputs), of which those that are not `kept` are 0. Nothing of their size is held."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, steps: Tensor, below: int) -> Tensor:
        ctx.save_for_backward(keys, steps)
        ctx.below = below
        return x * kept(keys, steps, x.shape[-1], below)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        keys, steps = ctx.saved_tensors
        return given * kept(keys, steps, given.shape[-1], ctx.below), None, None, None
