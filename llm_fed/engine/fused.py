"""Fused elementwise work: the norms, rotary embeddings and gated activations of a base in one kernel each, in the place
of three to twenty. torch has the norm; Liger Kernel (Hsu et al. 2024; the extra `gpu`) has the other two.

They take the place of what a base computes only where its code is LLaMA's in transformers, instruction by instruction,
and only within `fused`, so that no other model of the process notices.

Shape letters: N rows, T tokens, H heads, D numbers of a head, C features.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from llm_fed.models.base import device_of

ROTATE = "apply_rotary_pos_emb"  # what families call their function, which their layers look up when they run
Code = tuple[object, ...]


@dataclass(frozen=True)
class Kernels:
    """What computes in one launch.

    Attributes:
        gated: silu(x) * y of two tensors (..., C); None: the base's own code.
        rotated: queries and keys (N, H, T, D) by cos and sin (N or 1, T, D); None: likewise.
    """

    gated: Callable[[Tensor, Tensor], Tensor] | None = None
    rotated: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


@dataclass(frozen=True)
class Parts:
    """What a base has of LLaMA's code."""

    norms: tuple[nn.Module, ...]
    gates: tuple[nn.Module, ...]
    rotating: tuple[ModuleType, ...]  # of transformers, whose layers the base has

    def __bool__(self) -> bool:
        return bool(self.norms or self.gates or self.rotating)


def has_library() -> bool:
    """Whether Liger and what it is written in are installed."""
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


@cache
def kernels(kind: str) -> Kernels:
    """Those of Liger on a GPU, where it is installed; otherwise none.

    Args:
        kind: of the device.
    """
    if kind != "cuda" or not has_library():
        return Kernels()
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return Kernels(LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


@contextmanager
def fused(model: nn.Module, having: Kernels | None = None) -> Iterator[None]:
    """Within, what `parts` finds is computed in fewer launches. A backward pass belongs inside, too, as it may compute
    layers again.

    Args:
        having: the kernels (default: those that are there for its device).
    """
    having, of = having or kernels(device_of(model).type), parts(model)
    changed = [*((norm, _norm) for norm in of.norms)]
    if having.gated is not None:
        changed += [(gate, _gated(having.gated)) for gate in of.gates]
    functions = {module: getattr(module, ROTATE) for module in of.rotating if having.rotated is not None}
    try:
        for module, forward in changed:
            module.forward = MethodType(forward, module)
        for module_of, own in functions.items():
            setattr(module_of, ROTATE, _rotation(having.rotated, own))
        yield
    finally:
        for module, _ in changed:
            del module.forward
        for module_of, own in functions.items():
            setattr(module_of, ROTATE, own)


_found: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def parts(model: nn.Module) -> Parts:
    """Looked up once for each base."""
    if model not in _found:
        from transformers.models.llama import modeling_llama as llama

        modules = [module for module in model.modules() if "forward" not in vars(module)]
        norms = tuple(m for m in modules if _alike(type(m).forward, llama.LlamaRMSNorm.forward))
        gates = [m for m in modules if _alike(type(m).forward, llama.LlamaMLP.forward)]
        homes = {sys.modules[type(module).__module__] for module in model.modules()}
        rotating = [home for home in homes if _rotates_alike(home, llama)]
        _found[model] = Parts(norms, tuple(m for m in gates if _is_silu(m.act_fn)), tuple(rotating))
    return _found[model]


def _rotates_alike(home: ModuleType, llama: ModuleType) -> bool:
    names = (ROTATE, "rotate_half")
    return all(hasattr(home, name) and _alike(getattr(home, name), getattr(llama, name)) for name in names)


def _alike(one: Any, other: Any) -> bool:
    """Whether two functions have the same instructions, whatever their documentation says."""
    return _code(one) == _code(other)


@cache
def _code(function: Any) -> Code | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    constants = code.co_consts[1:] if inspect.unwrap(function).__doc__ else code.co_consts
    return code.co_code, code.co_names, code.co_varnames, tuple(each for each in constants if each is not None)


def _is_silu(activation: object) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(activation, nn.SiLU | type(ACT2FN["silu"]))


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:  # then the own code has another result's dtype
        return type(self).forward(self, hidden_states)
    with torch.autocast(hidden_states.device.type, enabled=False):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _gated(kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(kernel(gate, up) if gate.dtype == up.dtype else self.act_fn(gate) * up)

    return forward


def _rotation(kernel: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if unsqueeze_dim != 1 or not q.dtype == k.dtype == cos.dtype or q.shape[-1] != cos.shape[-1]:
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return kernel(q, k, cos, sin)

    return rotate
