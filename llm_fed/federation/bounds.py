"""What an upload may be beside the others of its round: norms of weights, and statistics far from the usual ones. Norms
are compared part by part, so that a part of small numbers cannot hide behind one of large numbers.

Running statistics are in no norm. Of n >= FEW clients each layer's are compared with the coordinate-wise median over
the clients, and so are the layer's means over its coordinates. A client that takes few steps stays near what it was
sent, so nothing is refused that is no further away than that. Of fewer clients there is no median that one of them
could not move, and they are compared with what they were sent alone, within ALONE times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from llm_fed.state import State, module_of
from llm_fed.state.outline import leaves
from llm_fed.state.roles import Given, Roles, Statistic, Weights, is_variance, role_of
from llm_fed.state.wire import Message

FEW = 3  # clients, from which on a median is one
LAYER, COORDINATE, ALONE = 10.0, 100.0, 1000.0  # times the usual: a layer's mean; one number; where nobody is beside it
ROWS = 3.0  # times the norm bound: one row of a statistic beside the rows of all clients
NOT_FINITE = "it holds NaN or infinite values, or its norm overflows"
_LEAST = 1e-5  # of a variance: what BatchNorm adds to each


def far(uploads: Mapping[int, Message], roles: Roles, given: Sequence[Given], bound: float | None) -> dict[int, str]:
    """By index of an upload why it is too far from the others, or from what its client was sent.

    Args:
        uploads: those that are otherwise without flaw, by index.
        given: of every place.
        bound: of norms, as a multiple of the median norm; None: uploads are compared with nothing.
    """
    parts = {index: dict(leaves(upload)) for index, upload in uploads.items()}
    reasons: dict[int, str] = {}
    for path in dict.fromkeys(path for own in parts.values() for path in own):
        among = {index: own[path] for index, own in parts.items() if path in own and index not in reasons}
        reasons |= _norms(among, path, bound)
        if bound is None:
            continue
        among = {index: value for index, value in among.items() if index not in reasons}
        role = next((role_of(roles, path, value) for value in among.values()), None)
        if isinstance(role, Weights):
            reasons |= _running(
                among, path, role, {index: given[index].at(path) if role.known else None for index in among}
            )
        elif isinstance(role, Statistic) and role.rows:
            present = {k: value[role.present(path, uploads[k])] for k, value in among.items()}
            reasons |= _rows(present, path, ROWS * bound)
    return reasons


def _name(path: str) -> str:
    return f"upload.{path}" if path else "upload"


def _norms(values: Mapping[int, Message], path: str, bound: float | None) -> dict[int, str]:
    """Norms of 0 are left out of the median: where most clients change nothing, who does is compared with the others
    who do."""
    norms = {index: _norm(value) for index, value in values.items()}
    usual = [norm for norm in norms.values() if 0 < norm < math.inf]
    median = statistics.median(usual) if usual else math.inf
    reasons, what = {}, f"the norm of {_name(path)}" if path else "its norm"
    for index, norm in norms.items():
        if not math.isfinite(norm):
            reasons[index] = (f"{_name(path)}: " if path else "") + NOT_FINITE
        elif bound is not None and norm > bound * median:
            over = f"is over {bound:g} times the median {median:.3g} of this round (norm_bound)"
            reasons[index] = f"{what} {norm:.3g} {over}"
    return reasons


def _norm(value: Message) -> float:
    """Euclidean norm of the floating numbers of one part of a message."""
    if isinstance(value, State):
        return value.norm()
    if isinstance(value, Tensor):
        return float(torch.linalg.vector_norm(value.double())) if value.is_floating_point() else 0.0
    return abs(value) if isinstance(value, float) else 0.0


def _rows(present: Mapping[int, Tensor], path: str, bound: float) -> dict[int, str]:
    """One row of a statistic (C, D) beside all rows of all clients."""
    norms = {index: torch.linalg.vector_norm(rows.double().flatten(1), dim=1) for index, rows in present.items()}
    if len(norms) < FEW:
        return {}
    every = torch.cat([*norms.values()])
    median = float(every[every > 0].median()) if bool((every > 0).any()) else math.inf
    return {
        index: f"a row of {_name(path)} has norm {float(own.max()):.3g}, over {bound:g} times the median {median:.3g}"
        for index, own in norms.items()
        if len(own) and float(own.max()) > bound * median
    }


def _running(
    states: Mapping[int, State], path: str, role: Weights, sent: Mapping[int, Mapping[str, Tensor] | None]
) -> dict[int, str]:
    """Of the clients' running statistics the first that is too far away, by index."""
    known = [index for index in states if sent[index]]
    indices = known if role.changes and role.known else [*states]
    several = len(indices) >= FEW
    indices = indices if several else known
    names = [name for index in indices[:1] for name, v in states[index].extras.items() if v.is_floating_point()]
    usual: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for name in names:
        values = torch.stack([states[index].extras[name].flatten().double() for index in indices])
        given = [sent[index] for index in indices]
        start = torch.stack([its[name].flatten().double() if its else torch.zeros_like(values[0]) for its in given])
        values = values + start if role.changes else values
        usual[name] = values, start, values.median(0).values if several else start[0]
    reasons: dict[int, str] = {}
    for name, (stacked, start, middle) in usual.items():
        spread, values_of_variance = _spread(name, usual), is_variance(name) and role.known
        off, allowed = (stacked, start) if values_of_variance else ((stacked - middle).abs(), (start - middle).abs())
        scale = torch.maximum(middle, spread) if values_of_variance else torch.maximum(middle.abs(), spread)
        times = (LAYER, COORDINATE) if several else (ALONE, ALONE)
        layer = off.mean(1) > torch.maximum(allowed.mean(1) * (1 + 1e-6), times[0] * scale.mean())
        one = (off > torch.maximum(allowed * (1 + 1e-6), times[1] * torch.maximum(scale, scale.mean()))).any(1)
        if values_of_variance and several:  # a layer of no variance makes its input as large as can be
            layer |= stacked.mean(1) < torch.minimum(start.mean(1), middle.mean()) / COORDINATE
        beside = f"the median {float(middle.abs().mean()):.3g} of this round" if several else "what it was sent"
        for row in (layer | one).nonzero().flatten().tolist():
            what = f"{_name(path)}.extras.{name} holds {float(stacked[row][off[row].argmax()]):.3g}"
            over = times[0] if bool(layer[row]) else times[1]
            reasons.setdefault(indices[row], f"{what}, too far from {beside} (over {over:g} times)")
    return reasons


def _spread(name: str, usual: Mapping[str, tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """What is usual in a layer: of a variance BatchNorm's least one; of a mean the deviation of its numbers."""
    least = torch.tensor(_LEAST, dtype=torch.float64)
    if is_variance(name):
        return least
    beside = usual.get(f"{module_of(name)}.running_var".removeprefix("."))
    return (beside[2].mean().clamp(min=_LEAST) if beside else least).sqrt()
