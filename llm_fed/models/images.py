"""Image models that are built here, by name, and what a checkpoint says of the pictures that it takes. The ResNets are
the narrow ones of the FedMerge paper (Table 1): ResNet-9 to ResNet-152 with an eighth of the usual channels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BaseImageProcessor

from llm_fed.basics.errors import UserError
from llm_fed.models.cnn import CNN, CNNS

WIDTHS = (8, 16, 32, 64)  # of the four stages
EXPANSION = 4  # of a bottleneck block's outputs over its width


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class Block(nn.Module):
    """A residual block: `relu(body(x) + shortcut(x))`, where the shortcut is a 1x1 convolution if the shape changes.

    Basic: two 3x3 convolutions. Bottleneck: 1x1 down to the width, 3x3, 1x1 up to four times the width. The stride is
    that of the first 3x3 convolution. BatchNorm after every convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = width * EXPANSION if bottleneck else width
        self.stride = stride
        self.shortcut = _convolution(inputs, outputs, 1) if (stride, inputs) != (1, outputs) else nn.Identity()
        if bottleneck:
            convolutions = [_convolution(inputs, width, 1), nn.ReLU(), _convolution(width, width, 3, stride)]
        else:
            convolutions = [_convolution(inputs, width, 3, stride)]
        self.body = nn.Sequential(*convolutions, nn.ReLU(), _convolution(width, outputs, 1 if bottleneck else 3))

    def forward(self, x: Tensor) -> Tensor:
        # A 1x1 convolution with a stride reads just these pixels. torch 2.13 on a CPU crashes in the backward pass of
        # the strided form: 8 channels, channels last, 56 pixels or more.
        kept = x[:, :, :: self.stride, :: self.stride]
        return (self.body(x) + self.shortcut(kept)).relu()


class ResNet(nn.Module):
    """A 3x3 stem of 8 channels, four stages of widths 8, 16, 32 and 64, global average pooling, one linear layer.

    Every stage but the first halves height and width; the stem keeps them, as is usual on small images. Of images up to
    8x8 pixels a batch of one cannot be trained on: one value per channel is left, which BatchNorm refuses.

    Args:
        blocks: their number in each of the four stages.
        bottleneck: whether blocks are bottlenecks, as in ResNet-50 and deeper.
        classes: C, the number of labels.
    """

    def __init__(self, blocks: Sequence[int], bottleneck: bool, classes: int):
        super().__init__()
        channels = WIDTHS[0]
        self.stem = nn.Sequential(_convolution(3, channels, 3), nn.ReLU())
        stages = []
        for stage, (count, width) in enumerate(zip(blocks, WIDTHS, strict=True)):
            made = []
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                made.append(Block(channels, width, stride, bottleneck))
                channels = width * EXPANSION if bottleneck else width
            stages.append(nn.Sequential(*made))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 3, H, W) of any size."""
        return self.head(self.stages(self.stem(pixel_values)).mean((2, 3)))


RESNETS: Mapping[str, Callable[[int], nn.Module]] = {  # which take images of any size
    "resnet-9": partial(ResNet, (1, 1, 1, 1), False),
    "resnet-18": partial(ResNet, (2, 2, 2, 2), False),
    "resnet-34": partial(ResNet, (3, 4, 6, 3), False),
    "resnet-50": partial(ResNet, (3, 4, 6, 3), True),
    "resnet-101": partial(ResNet, (3, 4, 23, 3), True),
    "resnet-152": partial(ResNet, (3, 8, 36, 3), True),
}

ARCHITECTURES: Mapping[str, Callable[[int], nn.Module]] = {"cnn": CNN, **CNNS, **RESNETS}  # their weights are drawn
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
