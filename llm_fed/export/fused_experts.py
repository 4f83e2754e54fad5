"""Adapters on fused experts as PEFT lays them out: one A (E r, in) and one B (out, r E) for a parameter, the experts'
rows of A below each other, and their columns of B in turns.

PEFT wraps a block once for each of its parameters that is adapted, in their order, so all but the last have
`base_layer` in their names. `tests/engine/test_fused_experts.py` compares both with PEFT.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from llm_fed.models.fused_experts import fused_parameters
from llm_fed.models.lora import Lora
from llm_fed.state import FACTORS, pair


def together(entries: Mapping[str, Tensor], model: nn.Module, structure: Lora) -> dict[str, Tensor]:
    """An adapter's entries, those of each fused parameter as PEFT's one pair. `entries`: of `models.lora.layout`."""
    made = dict(entries)
    for name, experts, location in _placed(model, structure):
        pairs = [pair(f"{name}.{expert}", "") for expert in range(experts)]
        a, b = ([made.pop(each[factor]) for each in pairs] for factor in (0, 1))
        made[f"{location}.{FACTORS[0]}"] = torch.cat(a)
        made[f"{location}.{FACTORS[1]}"] = torch.stack(b, -1).flatten(1)
    return made


def apart(tensors: Mapping[str, Tensor], model: nn.Module, structure: Lora, prefix: str) -> dict[str, Tensor]:
    """The tensors of a file by the names that an ordinary layer's would have, those of fused parameters by expert; what
    has not the shape of such a pair stays as it is. `prefix`: of PEFT's names."""
    made = dict(tensors)
    for name, experts, location in _placed(model, structure):
        a, b = (made.get(f"{prefix}{location}.{factor}.weight") for factor in FACTORS)
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or len(a) % experts or b.shape[1] % experts:
            continue
        parts = zip(a.chunk(experts), b.unflatten(1, (-1, experts)).unbind(-1), strict=True)
        for factor in FACTORS:
            del made[f"{prefix}{location}.{factor}.weight"]
        for expert, both in enumerate(parts):
            for entry, part in zip(pair(f"{name}.{expert}", ""), both, strict=True):
                made[f"{prefix}{entry}.weight"] = part.contiguous()
    return made


def _placed(model: nn.Module, structure: Lora) -> list[tuple[str, int, str]]:
    """Of each fused parameter that is adapted: its name, its number of experts, and where PEFT puts its adapter."""
    of = defaultdict(list)
    for name, fused in fused_parameters(model, structure.parameters).items():
        of[name.rpartition(".")[0]].append((name, fused.experts))
    return [
        (name, experts, block + ".base_layer" * (len(held) - 1 - number))
        for block, held in of.items()
        for number, (name, experts) in enumerate(held)
    ]
