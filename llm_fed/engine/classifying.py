"""What a classifier says of many examples without training, and heads that are trained on its features.

Shape letters: N examples, C classes, H features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics import signs
from llm_fed.engine.examples import Examples
from llm_fed.engine.memory import budget_and_overhead
from llm_fed.engine.on_device import on_device
from llm_fed.method.requests import FitHead
from llm_fed.models.base import Base
from llm_fed.models.joined import Answer, full
from llm_fed.state import State


@torch.inference_mode()
def in_chunks(
    base: Base, examples: Examples, items: Sequence[Any], within: Callable[[slice], AbstractContextManager[Any]]
) -> Answer:
    """The base's answer to all items, in float32 at least, on the CPU.

    Args:
        within: the context for a part of the items, such as an attached bank.
    """
    answers, longest = [], max(map(examples.length, items), default=1)
    size = max(1, budget_and_overhead(base.device)[0] // longest)
    for at in range(0, len(items), size):
        batch = on_device(examples.collate(items[at : at + size]), base.device)
        with within(slice(at, at + size)), base.computing():
            answers.append(examples.answer(base.model, batch))
        signs.answered(len(items[at : at + size]))
    return Answer.joined(answers).map(Tensor.cpu).map(full)


def fit_head(features: Tensor, labels: Tensor, requested: FitHead) -> State:
    """The linear head (weight, bias) trained, by Adam, on the features (N, H) of its examples and their labels (N,)."""
    features = features.to(requested.head.row)
    parameters = [nn.Parameter(tensor.clone()) for tensor in requested.head.tensors().values()]
    optimizer = torch.optim.Adam(parameters, lr=requested.lr)
    for batch in requested.batches:
        optimizer.zero_grad()
        chosen = torch.tensor(batch)
        logits = nn.functional.linear(features[chosen], *parameters)
        nn.functional.cross_entropy(logits, labels[chosen]).backward()
        optimizer.step()
    return State.of(dict(zip(requested.head, parameters, strict=True)))
