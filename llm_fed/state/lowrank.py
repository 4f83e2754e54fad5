"""LowRank: a state whose matrices travel as two thin factors each, so that an update takes fewer bytes.

Shape letters: m rows, n columns, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llm_fed.state import Layout, State

Factors = tuple[Tensor, Tensor]  # (m, r), (r, n)


class LowRank(State):
    """A state; `wire.pack` sends the factors of an entry in its place. ValueError: factors that do not fit their entry,
    or entries that are missing.

    Args:
        layout: of all entries.
        factors: by entry of shape (m, ...) the two factors of the (m, n) matrix of its numbers.
        rest: the other entries, and the extras.
    """

    __slots__ = ("factors",)

    def __init__(self, layout: Layout, factors: Mapping[str, Factors], rest: State):
        if {*factors, *rest} != {*layout.names}:
            raise ValueError(f"{len(factors)} products and {len(rest)} entries for {len(layout.names)} entries")
        entries = {}
        for name, shape in layout.shape_of.items():
            entry = factors[name][0] @ factors[name][1] if name in factors else rest[name]
            if len(entry) != shape[0]:
                raise ValueError(f"{name} has {len(entry)} rows instead of {shape[0]}")
            entries[name] = entry.reshape(shape)
        super().__init__(layout, State.of(entries).row, rest.extras)
        self.factors = dict(factors)

    @property
    def rest(self) -> State:
        """The entries without factors, and the extras."""
        return self.pick([name for name in self if name not in self.factors], self.extras)


def truncated(state: State, energy: float) -> LowRank:
    """The state with each matrix cut to the smallest rank that keeps this share of its squared singular values.

    Of entries of more than two dimensions (convolutions) the rows are the outputs. An entry stays as it is where the
    factors would be no smaller. At least rank 1 stays. `energy`: above 0; at 1 or more nothing is cut.
    """
    matrices = {name: state[name].flatten(1) for name in state if state[name].dim() > 1 and energy < 1}
    factors = {name: pair for name, matrix in matrices.items() if (pair := _factors(matrix, energy))}
    rest = state.pick([name for name in state if name not in factors], state.extras)
    return LowRank(state.layout, factors, rest)


def _factors(matrix: Tensor, energy: float) -> Factors | None:
    """The factors of the truncated singular value decomposition; None where they are no smaller than the matrix. The
    left singular vectors are the eigenvectors of the Gram matrix of the shorter side, in float64: faster than a
    decomposition of the matrix, and it converges."""
    if len(matrix) > matrix.shape[1]:
        pair = _factors(matrix.T, energy)
        return pair and (pair[1].T.contiguous(), pair[0].T.contiguous())
    wide = matrix.double()
    energies, basis = torch.linalg.eigh(wide @ wide.T)  # ascending
    shares = energies.flip(0).cumsum(0) / energies.sum()
    rank = int((shares < energy).sum()) + 1
    if rank * sum(matrix.shape) >= matrix.numel():
        return None
    left = basis[:, -rank:]
    return left.to(matrix.dtype).contiguous(), (left.T @ wide).to(matrix.dtype)
