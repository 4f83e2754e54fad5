"""Steps: the optimizer of one client over its row, or of many with equal settings over theirs; of adapters and of whole
models alike.

Shape letters: K rows, P parameters, n examples, S segments: parts of a row that are trained.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from llm_fed.basics.errors import ClientError, UserError
from llm_fed.method.optimizer import Group
from llm_fed.method.requests import Fit, Fitted
from llm_fed.state import FACTORS, Layout, State, factor_of, module_of


def together(fits: Sequence[Fit]) -> list[list[int]]:
    """The indices of the fits that `Steps` can take together: what they train, and how, is equal at every step."""
    known: list[tuple[object, ...]] = []
    groups: list[list[int]] = []
    for k, fit in enumerate(fits):
        steps = 0 if fit.optimizer.decay == "constant" else len(fit.batches)
        settings = fit.optimizer, fit.train, fit.optimizer.correction is None, steps
        if settings in known:
            groups[known.index(settings)].append(k)
        else:
            known.append(settings)
            groups.append([k])
    return groups


def fitted(fit: Fit, state: State, losses: Sequence[float]) -> Fitted | ClientError:
    """What a site gets that has come to this state with these losses, by step; or at which step it failed."""
    hint = f"(lr {fit.optimizer.lr:g}); lower local.lr or set local.clip"
    for step, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            return ClientError(f"client {fit.site}: loss is {loss} at local step {step} {hint}")
    if not state.is_finite():
        return ClientError(f"client {fit.site}: weights not finite after {len(fit.batches)} local steps {hint}")
    return Fitted(state, tuple(loss for loss, batch in zip(losses, fit.batches, strict=False) if batch))


_Tail = tuple[Tensor, Tensor, Tensor, Tensor]  # of A and of B, values and gradients


class Steps:
    """Takes the optimizer steps of fits on rows of values, from rows of gradients.

    A step is a few operations on lists of tensors, however many rows there are, and each row gets bit for bit what it
    would get alone: nothing is summed over rows.

    Attributes:
        segments: the entries that lie in each parameter of a row, in the order of `parameters`.
        parameters: by row its S parts that are trained; their gradients are parts of the row of gradients.

    Args:
        fits: by their rows, with equal settings (see `together`); all begin with the first step.
        values, grads: (K, P), of the fits' starts and zeros.
        layout: of a row.

    Raises:
        UserError: `train`, `frozen` or a pattern of `lr_of` matches nothing, or nothing is left to train.
        ValueError: an optimizer's anchor or correction has other entries than the row.
    """

    def __init__(self, fits: Mapping[int, Fit], values: Tensor, grads: Tensor, layout: Layout):
        self._fits, self._values, self._grads, self._layout = dict(fits), values, grads, layout
        fit = next(iter(fits.values()))
        self._settings, self._places, self.segments = fit.optimizer, list[slice](), list[list[str]]()
        self.parameters: dict[int, list[nn.Parameter]] = {k: [] for k in fits}
        freeze = self._settings.frozen
        frozen = set() if freeze is None else set(layout.matching(freeze, "local.freeze"))
        trained = [name for name in layout.matching(fit.train) if name not in frozen]
        if not trained:
            raise UserError(f"local.freeze={freeze!r} leaves nothing to train; make it match less")
        special = {name: pattern for pattern in self._settings.lr_of for name in layout.matching(pattern)}
        groups: list[Group] = []
        for pattern, lr in {"": self._settings.lr, **self._settings.lr_of}.items():
            names = [name for name in trained if special.get(name, "") == pattern]
            first = len(self._places)
            for index in layout.joined(names):
                self._places.append(index)
                self.segments.append([name for name in names if index.start <= layout.slices[name].start < index.stop])
                for k, parameters in self.parameters.items():
                    parameters.append(nn.Parameter(values[k, index]))
            groups.append({"params": [p for own in self.parameters.values() for p in own[first:]], "lr": lr})
        self._optimizer = self._settings.over([group for group in groups if group["params"]])
        self._rates, self._taken, self._steps = [g["lr"] for g in self._optimizer.param_groups], 0, len(fit.batches)
        # By row: its parts, S of each, but for the tails, which are one of A and one of B for each layer.
        self._gradients, self._tails = dict[int, list[Tensor]](), dict[int, list[_Tail]]()
        self._anchors, self._corrections = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for k, job in self._fits.items():
            self._gradients[k] = [grads[k, index] for index in self._places]
            for parameter, gradient in zip(self.parameters[k], self._gradients[k], strict=True):
                parameter.grad = gradient
            if self._settings.proximal:
                self._anchors[k] = self._parts_of(job.optimizer.anchor or job.start)
            if self._settings.tail:
                self._tails[k] = [self._last(k, name) for name in layout.names if factor_of(name) == FACTORS[0]]
            if job.optimizer.correction is not None:
                self._corrections[k] = self._parts_of(job.optimizer.correction)
        self._active = list(self._fits)
        clips = self._settings.clip is not None
        self._adds = bool(clips or self._settings.proximal or self._settings.tail or self._corrections)

    def _parts_of(self, state: State) -> list[Tensor]:
        if state.layout != self._layout:
            raise ValueError(
                "the anchor and the correction of an optimizer need the entries of the state that is fitted"
            )
        row = state.row.to(self._values)
        return [row[index] for index in self._places]

    def _last(self, k: int, a: str) -> _Tail:
        """The last components of the adapter in row k whose A has this name."""
        assert self._settings.tail
        b, first = f"{module_of(a)}.{FACTORS[1]}", self._settings.tail.first
        (a_values, a_grads), (b_values, b_grads) = (
            [
                rows[k, self._layout.slices[name]].view(self._layout.shape_of[name])
                for rows in (self._values, self._grads)
            ]
            for name in (a, b)
        )
        return a_values[first:], a_grads[first:], b_values[:, first:], b_grads[:, first:]

    def add_clipped(self, each: Tensor, owners: Sequence[int]) -> None:
        """Add the gradients (n, P) of single examples to the rows that they belong to, each clipped as `Fit.private`
        says. The norm is that of what this client trains: the bank may train more for others. `owners`: the row of each
        example; of other rows than these they are left out."""
        for k in self._active:
            private, chosen = self._fits[k].private, [n for n, owner in enumerate(owners) if owner == k]
            if private is None or not chosen:
                continue
            own = each.index_select(0, torch.tensor(chosen).to(each.device))
            parts = [own[:, index] for index in self._places]
            norms = torch.stack([torch.linalg.vector_norm(p, dim=1, dtype=torch.float64) for p in parts]).norm(dim=0)
            factors = (private.clip / norms).clamp(max=1).to(each)
            for gradient, part in zip(self._gradients[k], parts, strict=True):
                gradient.add_(factors @ part)

    @torch.no_grad()
    def step(self, rows: Collection[int]) -> None:
        """One step of its own rows among these, with the gradients that are there; others rest from then on."""
        for k in self._active:
            if k not in rows:
                for parameter in self.parameters[k]:
                    parameter.grad = None  # then torch leaves it as it is
        self._active = [k for k in self._active if k in rows]
        if not self._active:
            return
        for k in self._active:
            if (private := self._fits[k].private) is not None:  # the sum of clipped gradients becomes their noisy mean
                sizes = [len(part) for part in self._gradients[k]]
                noise = private.secret.gaussians(sum(sizes), self._taken).to(self._grads)
                for part, drawn in zip(self._gradients[k], noise.split(sizes), strict=True):
                    part.add_(drawn, alpha=private.noise * private.clip).div_(private.size)
        if self._adds:
            self._add_terms()
        factor = self._settings.factor(self._taken, self._steps)
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self._taken += 1
        self._optimizer.step()

    def _add_terms(self) -> None:
        """To the gradients of the losses what `Optimizer` adds to them, and their clipping."""
        active, gradients = self._active, [part for k in self._active for part in self._gradients[k]]
        if self._settings.proximal:
            values, anchors = (
                [part for k in active for part in parts[k]] for parts in (self.parameters, self._anchors)
            )
            torch._foreach_add_(gradients, torch._foreach_sub(values, anchors), alpha=2 * self._settings.proximal)
        if self._settings.tail:
            columns = zip(*(tail for k in active for tail in self._tails[k]), strict=True)
            _add_tails(self._settings.tail.strength, *map(list, columns))
        if self._settings.clip is not None:
            norms = torch.stack(torch._foreach_norm(gradients)).view(len(active), -1)
            factors = (self._settings.clip / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1)
            for k, by in zip(active, factors.unbind(), strict=True):
                torch._foreach_mul_(self._gradients[k], by)
        if self._corrections:
            torch._foreach_add_(gradients, [part for k in active for part in self._corrections[k]])


def _add_tails(strength: float, a: list[Tensor], a_grads: list[Tensor], b: list[Tensor], b_grads: list[Tensor]) -> None:
    """Add the gradients of the products of norms of these ends of adapters."""
    norms_a, norms_b = (torch.stack(torch._foreach_norm(ends)) for ends in (a, b))
    least = torch.finfo(norms_a.dtype).tiny  # of a norm by which is divided: at zero the gradient is taken as zero
    for ends, grads, own, other in ((a, a_grads, norms_a, norms_b), (b, b_grads, norms_b, norms_a)):
        factors = strength * other / own.clamp(min=least)
        torch._foreach_add_(grads, torch._foreach_mul(ends, list(factors.unbind())))
