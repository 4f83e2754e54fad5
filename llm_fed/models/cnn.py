"""The small convolutional network of the Feddle paper (App. D): three convolutions, one pooling, two linear layers."""

from __future__ import annotations

from torch import Tensor, nn

SIZE = 32  # of its input images, in pixels


class CNN(nn.Module):
    """Three 3x3 convolutions, each followed by ReLU and the pooling layer (2x2, maximum), then two linear layers.

    The paper gives neither widths nor where the pooling stands. Here the pooling layer is used after every
    convolution, and the widths are 16, 32, 32 and 64: 47,818 parameters for ten classes (docs/results.md).

    Args:
        classes: C, the number of labels.
    """

    def __init__(self, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(32 * (SIZE // 8) ** 2, 64)
        self.head = nn.Linear(64, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 3, 32, 32)."""
        values = pixel_values
        for convolution in (self.conv1, self.conv2, self.conv3):
            values = self.pool(convolution(values).relu())
        return self.head(self.hidden(values.flatten(1)).relu())
