"""PEFT LoRA folders without their base: what each adds to a layer, by name; and one made of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llm_fed.basics.errors import UserError
from llm_fed.export import peft_settings
from llm_fed.export.peft_folders import PREFIX, WEIGHTS, check_one, peft_name, read_tensors
from llm_fed.export.peft_settings import CONFIG, AdapterSettings, decisive
from llm_fed.export.tensors import pack
from llm_fed.merge.factors import resized
from llm_fed.merge.products import layers
from llm_fed.state import FACTORS, State

_A, _B = (f".{factor}.weight" for factor in FACTORS)


@dataclass(frozen=True)
class Factors:
    """A PEFT folder without its base.

    Attributes:
        settings: what its adapter_config.json says.
        layers: by name of a layer its A (r, in) and s B (out, r), of any rank.
        head: what is trained whole, by name.
    """

    settings: AdapterSettings
    layers: Mapping[str, tuple[Tensor, Tensor]]
    head: Mapping[str, Tensor]


def read(folder: Path) -> Factors:
    """Read a PEFT LoRA folder by its own names; ranks and alphas may differ from layer to layer. UserError: it is none,
    damaged, or what it adds to a layer is no product of two matrices."""
    check_one(folder, "which no merge can; merge folders of one adapter each")
    said = peft_settings.read(folder)
    if said.dora or said.parameters:
        what = "is a DoRA adapter, whose magnitudes" if said.dora else "adapts the experts of a mixture, whose updates"
        raise UserError(
            f"{folder} {what} no merge can weigh; fold each adapter into the base (PEFT's merge_and_unload) and merge "
            "the models"
        )
    given = read_tensors(folder, decisive(said.alpha, said.whole))
    tensors = {name.removeprefix(PREFIX): value for name, value in given.items()}
    names = [name.removesuffix(_A) for name in tensors if name.endswith(_A)]
    scaling = said.scalings(names)
    found = {}
    for name in names:
        a, b = tensors.pop(f"{name}{_A}"), tensors.pop(f"{name}{_B}", None)
        if b is None or a.dim() != 2 or b.dim() != 2 or b.shape[1] != len(a) or len(a) != scaling[name][0]:
            raise UserError(
                f"{folder / WEIGHTS} has no A and B of {name} that fit each other and {CONFIG}; export it again"
            )
        found[name] = a, b * scaling[name][1]
    whole = {name: value for name, value in tensors.items() if f".{name}".rpartition(".")[0].endswith(said.whole)}
    if odd := next((name for name in tensors if not said.whole or name not in whole), None):
        raise UserError(
            f"{folder / WEIGHTS} holds {odd}, which is neither an A nor a B, so no merge knows what it means"
        )
    if not found or not all(each.isfinite().all() for each in (*sum(found.values(), ()), *whole.values())):
        raise UserError(f"{folder / WEIGHTS} holds no adapter, or NaN or infinite numbers; export it again")
    return Factors(said, found, whole)


def aligned(parents: Sequence[Factors]) -> list[State]:
    """Their adapters as states with the same layers, in one dtype; where one has no adapter its rank is 0. UserError: a
    layer has different sizes in two of them."""
    dtype = max((a.dtype for parent in parents for a, _ in parent.layers.values()), key=lambda each: each.itemsize)
    sizes: dict[str, tuple[int, int]] = {}
    for parent in parents:
        for name, (a, b) in parent.layers.items():
            size = len(b), a.shape[1]
            if sizes.setdefault(name, size) != size:
                raise UserError(
                    f"{parent.settings.folder} adapts {name} of {size} numbers, and {parents[0].settings.folder} "
                    f"of {sizes[name]}: these are adapters of different bases"
                )
    states = []
    for parent in parents:
        entries: dict[str, Tensor] = {}
        for name, (rows, columns) in sizes.items():
            a, b = parent.layers.get(name, (torch.zeros(0, columns), torch.zeros(rows, 0)))
            entries |= {f"{name}.{FACTORS[0]}": a.to(dtype), f"{name}.{FACTORS[1]}": b.to(dtype)}
        states.append(State.of(entries))
    return states


def mean_head(parents: Sequence[Factors], weights: Sequence[float]) -> dict[str, Tensor]:
    """The weighted mean of what is trained whole."""
    total = sum(weights)
    pairs = list(zip(parents, weights, strict=True))
    return {name: sum(parent.head[name] * (w / total) for parent, w in pairs) for name in parents[0].head}  # type: ignore[misc]


def contents(merged: State, head: Mapping[str, Tensor], parents: Sequence[Factors]) -> dict[str, bytes]:
    """The files of an adapter without scaling, whose layers may differ in rank: all get that of the largest."""
    rank = max(1, *(len(merged[a]) for _, a, _ in layers(merged)))
    tensors = {peft_name(name): value for name, value in resized(merged, rank).tensors().items()}
    tensors |= {PREFIX + name: value.to(merged.row) for name, value in head.items()}
    settings = peft_settings.merged(
        [parent.settings for parent in parents], rank, [name for name, _, _ in layers(merged)]
    )
    return {CONFIG: settings, WEIGHTS: pack(tensors, {}, decisive(rank, parents[0].settings.whole))}
