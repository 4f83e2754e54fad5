"""Small networks for 32x32 pixels: the `CNN` of the Feddle paper (App. D), CNN-1 to CNN-5 of the FedMoE paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor, nn

SIZE = 32  # of its input images, in pixels


class CNN(nn.Module):
    """Three 3x3 convolutions, each followed by ReLU and the pooling layer (2x2, maximum), then two linear layers.

    The paper gives neither widths nor where the pooling stands. Here the pooling layer is used after every
    convolution, and the widths are 16, 32, 32 and 64: 47,818 parameters for ten classes (docs/results/log/feddle.md).

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
            values = self.pool(convolution(values)).relu()  # ReLU keeps the order: the same as before pooling
        return self.head(self.hidden(values.flatten(1)).relu())


class FedMoECNN(nn.Module):
    """A network of the FedMoE paper (Table 4): two 5x5 convolutions, each with 2x2 max-pooling, three linear layers.

    The convolutions have no padding: read so, the sizes of CNN-1 to CNN-3 are the table's. ReLU follows every layer
    but the last. All but `head`, to the ReLU behind `fc2`, is the extractor: its 500 features have the same meaning in
    all five networks, whatever stands below them.

    Args:
        filters: of the second convolution (the first has 16).
        width: neurons of the first linear layer.
        classes: C, the number of labels.
    """

    def __init__(self, filters: int, width: int, classes: int):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 5)
        self.conv2 = nn.Conv2d(16, filters, 5)
        self.pool = nn.MaxPool2d(2)
        side = ((SIZE - 4) // 2 - 4) // 2
        self.fc1 = nn.Linear(filters * side**2, width)
        self.fc2 = nn.Linear(width, 500)
        self.head = nn.Linear(500, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits (N, C) of images (N, 3, 32, 32)."""
        values = pixel_values
        for convolution in (self.conv1, self.conv2):
            values = self.pool(convolution(values)).relu()
        values = self.fc1(values.flatten(1)).relu()
        return self.head(self.fc2(values).relu())


CNNS: Mapping[str, Callable[[int], nn.Module]] = {
    "cnn-1": partial(FedMoECNN, 32, 2000),
    "cnn-2": partial(FedMoECNN, 16, 2000),
    "cnn-3": partial(FedMoECNN, 32, 1000),
    "cnn-4": partial(FedMoECNN, 32, 800),
    "cnn-5": partial(FedMoECNN, 32, 500),
}
