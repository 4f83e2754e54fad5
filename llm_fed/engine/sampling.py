"""Sampled answers, for chats: scores are of greedy ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from llm_fed.basics.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How each token of an answer is drawn.

    Attributes:
        temperature: the logits are divided by it.
        top_p: the share of the probability of the likeliest tokens among which one is drawn (Holtzman et al. 2020).
        seed: None: each answer is another one.

    Raises:
        UserError: a number is out of its range.
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
        """Of `0.7`, or `0.7,0.9` with top-p.

        Args:
            key: where it stands, for the error.

        Raises:
            UserError: it is neither, or a number is out of its range.
        """
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
