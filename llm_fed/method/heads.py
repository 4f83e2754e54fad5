"""Heads of image models, and what clients exchange whose models differ: heads, and means by class.

Shape letters: N images, C classes, H features, D numbers of one image's logits or features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.method import Method, refuse_inert
from llm_fed.method.server import Server
from llm_fed.method.site import Site
from llm_fed.state import HEAD, State, factor_of


def head_shape(state: State) -> tuple[int, int]:
    """(C, H) of the head of an image model's state."""
    classes, features = state.layout.shape_of[f"{state.layout.head}.weight"]
    return classes, features


def refuse_without_head(method: Method, server: Server, *settings: str) -> None:
    """For `init`: refuse hyper-parameters about the head where no head is trained beside the LoRA factors."""
    head = any(factor_of(name) == HEAD for name in server.initial())
    for setting in settings:
        refuse_inert(method, setting, head, "a head that is trained beside the adapters, as classifiers have")


def own_model(client: Site, key: str = "model") -> State:
    """The model that never leaves the client, from its memory; at first the one that it begins with."""
    return client.memory.get(key) or client.initial()


def check_head(client: Site, state: State, shape: Sequence[int]) -> None:
    """Refuse a client whose model does not end as the run's base does. UserError: its head has another shape. `state`:
    the client's model. `shape`: (C, H), of the base's head."""
    if head_shape(state) != tuple(shape):
        raise UserError(
            f"the model of client {client.id} has {head_shape(state)[1]} features before its head, but base.name has "
            f"{shape[1]}; choose base.name and base.clients with equal numbers"
        )


def class_means(values: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """By class the mean (C, D) of its rows of `values` (N, D), zero where it has none, and their number (C,)."""
    counts = torch.bincount(labels, minlength=classes)
    sums = values.new_zeros(classes, values.shape[1]).index_add_(0, labels, values)
    return sums / counts.clamp(min=1)[:, None], counts
