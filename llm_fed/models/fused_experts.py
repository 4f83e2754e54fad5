"""The experts of a mixture as transformers holds them: one parameter (E, ...) for the matrices of all E experts.

PEFT adapts such a parameter by its name (`target_parameters`), all of its experts at once. Here each expert's matrix
has entries of its own, `{block}.{parameter}.{expert}.lora_A` and `.lora_B`, so that means, products and merges treat it
as they treat a linear layer's; `export.peft_folders` lays them out as PEFT does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from llm_fed.basics.errors import UserError

_NAMES = ("gate_up_proj", "up_proj", "down_proj")  # of such parameters, in all families of transformers


@runtime_checkable
class _FusedBlock(Protocol):
    """A module with fused experts, by transformers' interface for them (`use_experts_implementation`)."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool


@dataclass(frozen=True, eq=False)
class FusedParameter:
    """The matrices of all experts of one block."""

    block: Any  # the module that holds it, and routes tokens to it
    name: str

    @property
    def weight(self) -> Tensor:
        """(E, out, in), or (E, in, out) where the block is `is_transposed`."""
        return self.block.get_parameter(self.name)

    @property
    def experts(self) -> int:
        """E."""
        return len(self.weight)

    @property
    def sizes(self) -> tuple[int, int]:
        """(in, out) of each expert."""
        first, second = self.weight.shape[1:]
        return (first, second) if self.block.is_transposed else (second, first)


def fused_parameters(model: nn.Module, chosen: Sequence[str]) -> dict[str, FusedParameter]:
    """Those whose names end with one of `chosen`, by name and in module order, as PEFT finds them. UserError: one of
    `chosen` matches nothing, or what is no parameter of fused experts."""
    known = _all(model) if chosen else {}
    for ending in chosen:
        if not any(_ends(name, ending) for name in known):
            other = next((name for name, _ in model.named_parameters() if _ends(name, ending)), "")
            there = known_parameters(model)
            raise UserError(
                f"adapter.target_parameters names {ending!r}, "
                + (f"which is {other}; only the parameters of fused experts can be named"
                   if other else f"but no parameter of {type(model).__name__} has this name")
                + (f"; it has {', '.join(there)}" if there else "; this base has no fused experts, leave it out")
            )  # fmt: skip
    return {name: one for name, one in known.items() if any(_ends(name, ending) for ending in chosen)}


def known_parameters(model: nn.Module) -> tuple[str, ...]:
    """What the fused parameters of a model are called, each with its block's name: `experts.down_proj`."""
    return tuple(sorted({".".join(name.split(".")[-2:]) for name in _all(model)}))


def _all(model: nn.Module) -> dict[str, FusedParameter]:
    return {
        f"{location}.{name}": FusedParameter(module, name)
        for location, module in model.named_modules()
        if isinstance(module, _FusedBlock)
        for name, parameter in model.get_submodule(location).named_parameters(recurse=False)
        if name in _NAMES and parameter.dim() == 3
    }


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
