"""Deltas: what lies beneath the adapters of a bank (`merge.delta`). Rows whose deltas are equal share one, so that a
whole cohort adds it to a layer at once.

Shape letters: N rows of a batch, T tokens, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from llm_fed.merge.delta import DENSE, under
from llm_fed.state import FACTORS, State

Layers = dict[str, dict[str, Tensor]]  # by layer and by the last part of the name


_NOTHING = -1  # instead of the number of a delta


class Deltas:
    """Those of the rows of a bank; a row that was not loaded has none."""

    def __init__(self, rows: Tensor):
        self._like = rows
        self._known: list[Layers] = []  # as the states hold them
        self._different: list[Layers] = []  # the same, as the rows are
        self._of = [_NOTHING] * len(rows)

    def load(self, k: int, state: State) -> None:
        """Take what lies beneath the state of row k."""
        beneath = under(state)
        # Compared where the states are, as comparing on a GPU would wait for it.
        n = next((n for n, other in enumerate(self._known) if _equal(beneath, other)), len(self._known))
        self._of[k] = n
        if n == len(self._known):
            self._known.append(beneath)
            self._different.append(
                {layer: {part: t.to(self._like) for part, t in parts.items()} for layer, parts in beneath.items()}
            )

    def on(self, owners: Sequence[int]) -> dict[str, DeltaHook]:
        """By layer beneath which something lies the forward hook for a batch whose row n goes through the bank's row
        owners[n]."""
        requested = [self._of[k] for k in owners]
        parts: dict[str, list[tuple[Tensor | None, dict[str, Tensor]]]] = {}
        for n in sorted(set(requested) - {_NOTHING}):
            rows = [index for index, other in enumerate(requested) if other == n]
            where = None if len(rows) == len(requested) else torch.tensor(rows).to(self._like.device)
            for name, delta in self._different[n].items():
                parts.setdefault(name, []).append((where, delta))
        return {name: DeltaHook(each, len(requested)) for name, each in parts.items()}


@dataclass(frozen=True)
class DeltaHook:
    """A forward hook: the layer's output y becomes y + D x, of the rows that have a D, in the dtype of y."""

    parts: list[tuple[Tensor | None, dict[str, Tensor]]]  # rows (None: all), and B and A, or D
    num_rows: int  # N

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, y = inputs[0].to(output.device), output.reshape(self.num_rows, -1, output.shape[-1])
        x = x.reshape(self.num_rows, -1, x.shape[-1])
        for rows, delta in self.parts:
            part, here = x if rows is None else x[rows.to(x.device)], {k: v.to(y.device) for k, v in delta.items()}
            if not torch.is_autocast_enabled(x.device.type):
                part = part.to(next(iter(here.values())).dtype)
            more = nn.functional.linear(part, here[DENSE] if DENSE in here else here[FACTORS[0]])
            more = more if DENSE in here else nn.functional.linear(more, here[FACTORS[1]])
            y = y + more.to(y.dtype) if rows is None else y.index_add(0, rows.to(y.device), more.to(y.dtype))
        return y.view(output.shape)


def _equal(one: Layers, other: Layers) -> bool:
    mine, theirs = ({(n, m): t for n, parts in each.items() for m, t in parts.items()} for each in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())
