"""Delta: what a federation adds to the base's layers for all clients, beneath their adapters, frozen and of any rank.

Of a layer it is a pair of factors, `lora_B` (out, R) and `lora_A` (R, in), whose product is added as it is, without any
scaling; or the dense `weight` (out, in), where the pair would hold more numbers. As a state of these entries it travels
and is kept. In the extras of an adapter's state, under names of their own, it goes to where the base computes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from llm_fed.merge.factors import Pair
from llm_fed.merge.products import layers
from llm_fed.state import FACTORS, HEAD, Layout, State, factor_of, module_of

DENSE = "weight"
_EXTRA = "delta:"  # begins the names of extras


def nothing(like: State) -> State:
    """The delta that adds nothing, in the dtype of `like`."""
    return State(Layout((), ()), like.row[:0])


def of_pairs(pairs: Mapping[str, Pair], like: State) -> State:
    """The delta whose products these are by layer, in the dtype of `like`."""
    entries: dict[str, Tensor] = {}
    for layer, (b, a) in pairs.items():
        if len(a) * (len(b) + a.shape[1]) >= len(b) * a.shape[1]:
            entries[f"{layer}.{DENSE}"] = b @ a
        elif len(a):
            entries |= {f"{layer}.{FACTORS[0]}": a, f"{layer}.{FACTORS[1]}": b}
    return State.of({name: value.to(like.row) for name, value in entries.items()}) if entries else nothing(like)


def added(first: State, second: State) -> State:
    """Both together."""
    parts = [_by_layer(first), _by_layer(second)]
    entries: dict[str, Tensor] = {}
    for layer in dict.fromkeys([*parts[0], *parts[1]]):
        here = [part[layer] for part in parts if layer in part]
        if all(DENSE not in each for each in here):
            pair = torch.cat([each[FACTORS[1]] for each in here], 1), torch.cat([each[FACTORS[0]] for each in here])
            entries |= of_pairs({layer: pair}, first).tensors()
        else:
            entries[f"{layer}.{DENSE}"] = sum(map(_product, here[1:]), _product(here[0]))
    return State.of(entries) if entries else nothing(first)


def beneath(adapter: State, delta: State) -> State:
    """The adapter's state with the delta among its extras."""
    extras = {f"{_EXTRA}{name}": value for name, value in delta.tensors().items()}
    return State(adapter.layout, adapter.row, adapter.extras | extras)


def under(state: State) -> dict[str, dict[str, Tensor]]:
    """What lies beneath an adapter's state, by layer and by the last part of the name."""
    beneath = {name.removeprefix(_EXTRA): value for name, value in state.extras.items() if name.startswith(_EXTRA)}
    return _by_layer(State.of(beneath)) if beneath else {}


def joined(state: State, scaling: float) -> State:
    """One adapter, of a higher rank with the same scaling, that adds what the state's adapter and the delta beneath it
    add together; an adapter that adds nothing is left out of it."""
    below = under(state)
    if not below:
        return State(state.layout, state.row)
    pairs: dict[str, list[Pair]] = {}
    speaks = any(bool(state[b].any()) for _, _, b in layers(state))
    for layer, a, b in layers(state):
        pairs[layer] = [(state[b], state[a])] if speaks else []
        if layer in below:
            left, right = _factors(below[layer])
            pairs[layer].append((left / scaling, right))
    rank = max(1, *(sum(len(a) for _, a in each) for each in pairs.values()))
    entries = {name: state[name] for name in state if factor_of(name) == HEAD}
    for layer, a, b in layers(state):
        used = sum(len(right) for _, right in pairs[layer])
        tall, wide = state[b].new_zeros(len(state[b]), rank - used), state[a].new_zeros(rank - used, state[a].shape[1])
        entries[a] = torch.cat([right for _, right in pairs[layer]] + [wide])
        entries[b] = torch.cat([left for left, _ in pairs[layer]] + [tall], 1)
    return State.of({name: entries[name] for name in state})


def apart(state: State, scaling: float, layout: Layout) -> State:
    """The inverse of `joined`, as far as it matters: a zero adapter of this layout with all of `state` beneath it, in
    the factors that it has. `scaling`: of `state`."""
    heads = [name for name in state if factor_of(name) == HEAD]
    below = {
        name: state[name] * (scaling if factor_of(name) == FACTORS[1] else 1.0) for name in state if name not in heads
    }
    empty = State(layout, state.row.new_zeros(layout.size))
    return beneath(empty.updated(state.pick(heads)) if heads else empty, State.of(below))


def _by_layer(delta: State) -> dict[str, dict[str, Tensor]]:
    layers: dict[str, dict[str, Tensor]] = {}
    for name, value in delta.tensors().items():
        layers.setdefault(module_of(name), {})[name.rpartition(".")[2]] = value
    return layers


def _product(layer: Mapping[str, Tensor]) -> Tensor:
    return layer[DENSE] if DENSE in layer else layer[FACTORS[1]] @ layer[FACTORS[0]]


def _factors(layer: Mapping[str, Tensor]) -> Pair:
    """B and A; of a dense one of its own rank, found by its singular values."""
    if DENSE not in layer:
        return layer[FACTORS[1]], layer[FACTORS[0]]
    u, s, v = torch.linalg.svd(layer[DENSE].double(), full_matrices=False)
    rank = int((s > s[0] * max(layer[DENSE].shape) * torch.finfo(layer[DENSE].dtype).eps).sum())
    root = s[:rank].sqrt()
    return (u[:, :rank] * root).to(layer[DENSE]), (root[:, None] * v[:rank]).to(layer[DENSE])
