"""Image models side by side, and how they classify together: in turn, by a gate, or by weights. The gate is that of the
FedMoE paper (Fig. 3, Sec. 4.3), which says for every image how much each expert's features count.

Shape letters: N images, C classes, H features, E models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from llm_fed.basics.errors import UserError, require
from llm_fed.models.structure import GateShape


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


@dataclass(frozen=True)
class Answer:
    """What a model, or models together, make of N images."""

    logits: Tensor  # (N, C)
    features: Tensor  # (N, H), what the head reads
    parts: Mapping[str, Answer] = field(default_factory=dict)  # by name of a model, where there are several
    gate: Tensor | None = None  # (N, E): the weight that each model's features have for each image

    def map(self, change: Callable[[Tensor], Tensor]) -> Answer:
        """Every tensor changed."""
        parts = {name: part.map(change) for name, part in self.parts.items()}
        gate = None if self.gate is None else change(self.gate)
        return Answer(change(self.logits), change(self.features), parts, gate)

    def split(self, counts: Sequence[int]) -> list[Answer]:
        """The inverse of `joined`: the answers to so many images each; only of one model."""
        each = zip(self.logits.split(list(counts)), self.features.split(list(counts)), strict=True)
        return [Answer(logits, features) for logits, features in each]

    @staticmethod
    def joined(answers: Sequence[Answer]) -> Answer:
        """Those to consecutive images as one."""
        parts = {name: Answer.joined([answer.parts[name] for answer in answers]) for name in answers[0].parts}
        gates = [answer.gate for answer in answers if answer.gate is not None]
        return Answer(
            torch.cat([answer.logits for answer in answers]),
            torch.cat([answer.features for answer in answers]),
            parts,
            torch.cat(gates) if gates else None,
        )


def full(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class Joined(nn.Module):
    """Image models under names, all given the same images.

    `answer` is one of

    - first: the first model answers for all;
    - gate: the first model's head reads `sum_e g_e(x) features_e(x)`, where the others are extractors without a head,
      and the gate's weights g depend on the image (FedMoE, Yi et al. 2024, Eq. 3-6);
    - even: the same without a gate, g = 1 / E;
    - logits: `sum_e w_e logits_e(x)`;
    - probabilities: `sum_e w_e softmax(logits_e(x))`, whose logarithm stands for the logits.

    The weights w (E,) are an entry of their own, `weights`, even at first; no gradient reaches them.

    Args:
        heads: by model the name of its last linear layer.
        pixels: numbers of one image, 3 * height * width, for the gate.
        gate: its shape.

    Raises:
        UserError: models whose features a gate cannot add, as they differ in number.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        heads: Mapping[str, str],
        answer: str,
        pixels: int,
        gate: GateShape | None = None,
    ):
        super().__init__()
        require("answer", answer, ("first", "gate", "even", "logits", "probabilities"))
        self.names, self.heads, self.answer = tuple(models), dict(heads), answer
        widths = {name: model.get_submodule(heads[name]).in_features for name, model in models.items()}
        added = answer in ("gate", "even")
        if added and len(set(widths.values())) > 1:
            raise UserError(
                f"the extractors give {' and '.join(f'{width} ({name})' for name, width in widths.items())} features, "
                "which cannot be added; choose base.name and base.clients with equal numbers"
            )
        for name, model in models.items():
            if added and name != self.names[0]:
                model.set_submodule(heads[name], nn.Identity())
            self.add_module(name, model)
        if answer == "gate":
            gate = gate or GateShape()
            self.gate = Gate(pixels, gate.hidden, len(models), last_norm=gate.last_norm)
        if answer in ("logits", "probabilities"):
            self.weights = nn.Parameter(torch.full((len(models),), 1 / len(models)))

    def forward(self, pixel_values: Tensor) -> Answer:
        """Of images (N, 3, height, width)."""
        parts = {name: respond(self.get_submodule(name), pixel_values, self.heads[name]) for name in self.names}
        first = parts[self.names[0]]
        if self.answer == "first":
            return Answer(first.logits, first.features, parts)
        if self.answer in ("gate", "even"):
            extracted = torch.stack([part.features for part in parts.values()], -1)
            even = extracted.new_full((len(extracted), len(parts)), 1 / len(parts))
            weights = self.gate(pixel_values) if self.answer == "gate" else even
            features = (extracted * weights[:, None]).sum(-1)
            head = self.get_submodule(f"{self.names[0]}.{self.heads[self.names[0]]}")
            return Answer(head(features), features, parts, weights)
        logits = torch.stack([part.logits for part in parts.values()], -1)
        weights = self.weights.detach().to(logits.dtype)
        if self.answer == "logits":
            return Answer(logits @ weights, first.features, parts)
        return Answer((logits.log_softmax(1) + weights.log()).logsumexp(-1), first.features, parts)


def respond(module: nn.Module, pixel_values: Tensor, head: str) -> Answer:
    """The answer of one model - of our own, or of transformers' image classifiers - or of a `Joined` one. `head`: the
    name of its last linear layer."""
    return module(pixel_values) if isinstance(module, Joined) else heard(module, head, pixel_values)


def heard(module: nn.Module, head: str, *given: Tensor, **inputs: Tensor) -> Answer:
    """The answer of a classifier, with what its last linear layer `head` reads."""
    seen: list[Tensor] = []
    handle = module.get_submodule(head).register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
    try:
        output = module(*given, **inputs)
    finally:
        handle.remove()
    return Answer(output if isinstance(output, Tensor) else output.logits, seen[0])
