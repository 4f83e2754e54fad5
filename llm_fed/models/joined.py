"""Image models side by side, and how they classify together: in turn, by a gate, or by weights.

Shape letters: N images, C classes, H features, E models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import UserError, require
from llm_fed.models.gate import Gate
from llm_fed.models.structure import GateShape


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
        first = answers[0]
        parts = {name: Answer.joined([answer.parts[name] for answer in answers]) for name in first.parts}
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
    """The answer of one model - of our own, or of transformers' image classifiers - or of a `Joined` one.

    Args:
        head: the name of its last linear layer.
    """
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
