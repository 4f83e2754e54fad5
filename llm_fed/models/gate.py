"""The gating network of the FedMoE paper (Fig. 3, Sec. 4.3): for every image, how much each expert's features count."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class SwitchNorm(nn.Module):
    """Switchable normalisation (Luo et al. 2019) of vectors (N, D).

    `(x - mean) / sqrt(var + eps) * weight + bias`, where mean and var are each a learned convex mix of those over the D
    values of a vector (layer normalisation) and those of each value over the batch (batch normalisation).

    Luo et al. mix instance normalisation in too, over a channel's pixels. The FedMoE paper normalises *after* it
    flattens the image: each value is then a channel of its own, whose instance variance is zero, so two kinds remain,
    as in Luo et al.'s own layer for vectors.

    In evaluation mode, and for a training batch of one example, running statistics stand for the batch's, kept as
    torch's BatchNorm keeps them (Luo et al. average over batches once training is over).

    Args:
        features: D.
        eps: added to the mixed variance.
        momentum: of a batch in the running statistics.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, features: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.empty(features))
        self.bias = nn.Parameter(torch.empty(features))
        self.mean_weight = nn.Parameter(torch.empty(2))  # before the softmax; of the vector, of the batch
        self.var_weight = nn.Parameter(torch.empty(2))
        self.register_buffer("running_mean", torch.empty(features))
        self.register_buffer("running_var", torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both kinds count alike, scale 1, shift 0, running mean 0 and variance 1."""
        for ones in (self.weight, self.mean_weight, self.var_weight, self.running_var):
            nn.init.ones_(ones)
        for zeros in (self.bias, self.running_mean):
            nn.init.zeros_(zeros)

    def forward(self, x: Tensor) -> Tensor:
        """Normalised vectors (N, D) of x (N, D)."""
        own_var, own_mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        batch_mean, batch_var = self.running_mean, self.running_var
        if self.training and len(x) > 1:
            batch_var, batch_mean = torch.var_mean(x, 0, correction=0)
            with torch.no_grad():
                self.running_mean.lerp_(batch_mean, self.momentum)
                self.running_var.lerp_(batch_var * (len(x) / (len(x) - 1)), self.momentum)
        mean = _mix(self.mean_weight, own_mean, batch_mean)
        var = _mix(self.var_weight, own_var, batch_var)
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


def _mix(weight: Tensor, own: Tensor, batch: Tensor) -> Tensor:
    """(N, D) of statistics of the vectors (N, 1) and of the batch (D,)."""
    shares = weight.softmax(0)
    return shares[0] * own + shares[1] * batch


class BatchNorm(nn.BatchNorm1d):
    """torch's, but a training batch of one example, which has no variance, is normalised by the running statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if len(input) > 1:
            return super().forward(input)
        return functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class Gate(nn.Module):
    """Weights of the experts for each image: flatten, switch norm, linear (m), batch norm, sigmoid, linear, batch norm,
    softmax.

    The linear layers have no bias: the paper counts none, and batch normalisation would take it out again.

    Args:
        pixels: values of an image: 3 H W.
        hidden: m, neurons of the first linear layer. The paper gives no number, only that the gate is lightweight; with
            32 and images of 32x32 pixels it has 104,584 parameters, a sixth of CNN-5.
        experts: E.
        last_norm: whether the scores are normalised before the softmax, as in the paper. Over a batch they then have a
            variance of one, whatever they say.
    """

    def __init__(self, pixels: int, hidden: int = 32, experts: int = 2, *, last_norm: bool = True):
        super().__init__()
        self.norm = SwitchNorm(pixels)
        self.fc1 = nn.Linear(pixels, hidden, bias=False)
        self.norm1 = BatchNorm(hidden)
        self.fc2 = nn.Linear(hidden, experts, bias=False)
        self.norm2 = BatchNorm(experts) if last_norm else nn.Identity()

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Weights (N, E), each row summing to one, of images (N, 3, H, W)."""
        hidden = self.norm1(self.fc1(self.norm(pixel_values.flatten(1)))).sigmoid()
        scores = self.norm2(self.fc2(hidden))
        return scores.to(self.fc2.weight.dtype).softmax(-1)  # halves, which autocast gives, need not sum to one
