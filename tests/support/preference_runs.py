"""Pairs of answers for a tiny base, and what the engine makes of their losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from llm_fed.engine import gradients, inference
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.preferences import examples_of
from llm_fed.kinds.comparing import beside_others
from llm_fed.method.requests import Gradient
from llm_fed.models.lora import Lora, draw
from llm_fed.settings.objective import ObjectiveConfig
from llm_fed.state import State
from llm_fed.tasks.common import Example, Judged, Pair, Turn
from llm_fed.tasks.conversations import encoded

LORA = Lora(rank=2, alpha=8, dropout=0.0, target_modules=("q_proj", "v_proj"))
PAIRS = [
    (
        f"Which ward for case {number}?",
        ("Burns. " * (1 + number % 3)).strip(),
        ("No idea, ask. " * (1 + number % 2)).strip(),
    )
    for number in range(10)
]


def encoded_pairs(tokenizer: Any) -> list[Pair]:
    """PAIRS in the template `{prompt}` and a line break."""
    found = []
    for asked, chosen, other in PAIRS:
        one, two = (encoded(Example(asked, (answer,)), tokenizer, "plain") for answer in (chosen, other))
        found.append(Pair(one, two))
    return found


def judged(pairs: Sequence[Pair]) -> list[Judged]:
    """The chosen answer of every other pair, and the rejected ones of those between."""
    return beside_others(
        [Judged((pair.rejected, pair.chosen)[n % 2], bool(n % 2), pair.chosen) for n, pair in enumerate(pairs)], 10**6
    )


def moved(model: Any) -> State:
    """An adapter in float64 whose B is not zero."""
    state = draw(model, LORA, torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(state.row.numel(), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return state.like(state.row + 0.1 * noise)


def adapted(model: Any, objective: ObjectiveConfig) -> AdaptedModel:
    return AdaptedModel(model, LORA, examples_of(objective))


def with_reference(model: Any, objective: ObjectiveConfig, examples: Sequence[Any]) -> list[Any]:
    """The examples with what the base makes of them."""
    texts = [text for example in examples for text in example.texts]
    found = iter(inference.log_likelihoods(adapted(model, objective), None, texts))
    return [replace(example, reference=tuple(next(found) for _ in example.texts)) for example in examples]


def gradient(model: Any, objective: ObjectiveConfig, state: State, examples: Sequence[Any]) -> tuple[float, State]:
    """The mean loss and its gradient."""
    return gradients.mean_gradient(adapted(model, objective), Gradient("c", LORA, state, examples))


def conversation(*texts: str) -> tuple[Turn, ...]:
    """Turns of user and assistant by turns."""
    return tuple(Turn(("user", "assistant")[place % 2], text) for place, text in enumerate(texts))
