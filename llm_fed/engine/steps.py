"""Steps: one client's optimizer over its row, of adapters and of whole models alike.

Shape letters: n examples, P parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from llm_fed.errors import UserError
from llm_fed.models.lora import FACTORS, factor_of
from llm_fed.requests import Fit
from llm_fed.rng import generator
from llm_fed.state import Layout, State, module_of


class Steps:
    """Takes the optimizer steps of a fit on a row of values, from a row of gradients.

    Attributes:
        segments: the entries that lie in each parameter, in the order of `parameters`.
        parameters: parts of the row, whose gradients are parts of the row of gradients.

    Args:
        values, grads: (P,), of the fit's start and zeros.
        layout: of the row.

    Raises:
        UserError: `train`, `frozen` or a pattern of `lr_of` matches nothing, or nothing is left to train.
        ValueError: the optimizer's anchor or correction has other entries than the row.
    """

    def __init__(self, fit: Fit, values: Tensor, grads: Tensor, layout: Layout):
        self._settings, self._values, self._grads, self._private = fit.optimizer, values, grads, fit.private
        self._places: list[slice] = []
        self.segments: list[list[str]] = []
        self.parameters: list[nn.Parameter] = []
        frozen = set() if self._settings.frozen is None else set(layout.matching(self._settings.frozen))
        trained = [name for name in layout.matching(fit.train) if name not in frozen]
        if not trained:
            raise UserError(f"local.freeze={self._settings.frozen!r} leaves nothing to train; make it match less")
        special = {name: pattern for pattern in self._settings.lr_of for name in layout.matching(pattern)}
        groups = []
        for pattern, lr in {"": self._settings.lr, **self._settings.lr_of}.items():
            names = [name for name in trained if special.get(name, "") == pattern]
            first = len(self.parameters)
            for place in layout.joined(names):
                parameter = nn.Parameter(values[place])
                parameter.grad = grads[place]
                self._places.append(place)
                self.parameters.append(parameter)
                self.segments.append([name for name in names if place.start <= layout.slices[name].start < place.stop])
            groups.append({"params": self.parameters[first:], "lr": lr})
        self.optimizer = self._settings.over([group for group in groups if group["params"]])
        self._rates, self._taken, self._steps = [g["lr"] for g in self.optimizer.param_groups], 0, len(fit.batches)
        for place, parameter in zip(self._places, self.parameters, strict=True) if fit.moments else ():
            self.optimizer.state[parameter] = {
                name: (value[place] if value.dim() else value).to(values.device, copy=True)
                for name, value in (fit.moments or {}).items()
            }
        self._anchor = None
        if self._settings.proximal:
            self._anchor = self._row(self._settings.anchor or fit.start, layout)
        self._tails: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []  # of A and of B, values and gradients
        if self._settings.tail:
            self._tails = [self._last(name, layout) for name in layout.names if factor_of(name) == FACTORS[0]]
        self._correction = None if self._settings.correction is None else self._row(self._settings.correction, layout)

    def _last(self, a: str, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The last components of the adapter whose A has this name."""
        assert self._settings.tail
        b, first = f"{module_of(a)}.{FACTORS[1]}", self._settings.tail.first
        (a_values, a_grads), (b_values, b_grads) = (
            [row[layout.slices[name]].view(layout.shape_of[name]) for row in (self._values, self._grads)]
            for name in (a, b)
        )
        return a_values[first:], a_grads[first:], b_values[:, first:], b_grads[:, first:]

    def _row(self, state: State, layout: Layout) -> Tensor:
        if state.layout != layout:
            raise ValueError(
                "the anchor and the correction of an optimizer need the entries of the state that is fitted"
            )
        return state.row.to(self._values)

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer remembers, as `Fit.moments` holds it, on the CPU; zero for what is not trained."""
        found: dict[str, Tensor] = {}
        for place, parameter in zip(self._places, self.parameters, strict=True):
            for name, value in self.optimizer.state[parameter].items():
                if value is not None and value.shape == parameter.shape:
                    found.setdefault(name, torch.zeros_like(self._values))[place] = value
                elif value is not None:  # sgd without momentum
                    found[name] = value
        return {name: value.to("cpu", copy=True) for name, value in found.items()}

    def add_clipped(self, each: Tensor) -> None:
        """Add the gradients (n, P) of single examples, each clipped as `Fit.private` says.

        The norm is that of what this client trains: the bank may train more for others.
        """
        assert self._private is not None
        parts = [each[:, place] for place in self._places]
        norms = torch.stack([torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]).norm(dim=0)
        factors = (self._private.clip / norms).clamp(max=1).to(each)
        for place, part in zip(self._places, parts, strict=True):
            self._grads[place].add_(factors @ part)

    def _add_noise(self) -> None:
        """Turn the sum of clipped gradients, perhaps of none, into their noisy mean."""
        assert self._private is not None
        draws, deviation = generator(self._private.seed, self._taken), self._private.noise * self._private.clip
        parts = [self._grads[place] for place in self._places]
        noise = torch.randn(sum(map(len, parts)), dtype=torch.float64, generator=draws).to(self._grads)
        for part, drawn in zip(parts, noise.split([len(part) for part in parts]), strict=True):
            part.add_(drawn, alpha=deviation).div_(self._private.size)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """One step with the gradients that are there; a `scaler` (float16) skips it where one is not finite."""
        if self._private is not None:
            self._add_noise()
        if scaler:
            scaler.unscale_(self.optimizer)
        if self._anchor is not None:
            for place in self._places:
                drift = self._values[place] - self._anchor[place]
                self._grads[place].add_(drift, alpha=2 * self._settings.proximal)
        for a, a_grads, b, b_grads in self._tails:
            assert self._settings.tail
            strength, norm_a, norm_b = self._settings.tail.strength, a.norm(), b.norm()
            least = torch.finfo(a.dtype).tiny  # of a norm by which is divided: at zero the gradient is taken as zero
            a_grads.add_(strength * norm_b / norm_a.clamp(min=least) * a)
            b_grads.add_(strength * norm_a / norm_b.clamp(min=least) * b)
        if self._settings.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self._settings.clip)
        if self._correction is not None:
            for place in self._places:
                self._grads[place].add_(self._correction[place])
        factor = self._settings.factor(self._taken, self._steps)
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._taken += 1
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
