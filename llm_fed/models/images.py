"""Image models that are built here, by name, and what a checkpoint says of the pictures that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import BaseImageProcessor

from llm_fed.basics.errors import UserError
from llm_fed.models.cnn import CNN, CNNS
from llm_fed.models.resnet import RESNETS

OF_ANY_SIZE = RESNETS
ARCHITECTURES: Mapping[str, Callable[[int], nn.Module]] = {"cnn": CNN, **CNNS, **OF_ANY_SIZE}  # their weights are drawn
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation of pixels, where a checkpoint says nothing


def drawn_once(name: str, classes: int) -> nn.Module:
    """A model of an architecture that is built here, in evaluation mode; its weights are the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ARCHITECTURES[name](classes).eval()


def head_of(model: nn.Module) -> str:
    """The name of the last linear layer."""
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise UserError(f"{type(model).__name__} has no linear layer that could be its head")
    return linear[-1]


def processing(folder: str, revision: str | None) -> Mapping[str, Any]:
    """What the checkpoint's preprocessor_config.json says; empty where it has none."""
    try:
        settings, _ = BaseImageProcessor.get_image_processor_dict(folder, revision=revision)
    except OSError:
        return {}
    return settings
