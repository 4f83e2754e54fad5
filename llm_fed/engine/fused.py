"""Fused elementwise work: the norms, rotary embeddings and gated activations of a base in one kernel each, in the place
of three to twenty. torch has the norm; Liger Kernel (Hsu et al. 2024; the extra `gpu`) has the other two.

They take the place of what a base computes only in families whose code is LLaMA's in transformers, and only within
`fused`, so that no other model of the process notices.

Shape letters: N rows, T tokens, H heads, D numbers of a head, C features.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llm_fed.engine.layers import forwards

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

Rotate = Callable[..., tuple[Tensor, Tensor]]  # queries and keys (N, H, T, D) by cos and sin (N or 1, T, D)

ROTATE = "apply_rotary_pos_emb"  # what families call their function, which their layers look up when they run
NORMS, GATES = ({f"{family}{part}" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")} for part in ("RMSNorm", "MLP"))


@dataclass(frozen=True)
class Kernels:
    """What computes in one launch. `gated`: silu(x) * y of (..., C); `rotated`: queries and keys. None: as written."""

    gated: Callable[[Tensor, Tensor], Tensor] | None = None
    rotated: Rotate | None = None


def has_library() -> bool:
    """Whether Liger and what it is written in are installed."""
    return find_spec("liger_kernel") is not None and find_spec("triton") is not None


@cache
def kernels(kind: str) -> Kernels:
    """Those of Liger on a GPU, where it is installed; otherwise none. `kind`: of the device."""
    if kind != "cuda" or not has_library():
        return Kernels()
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return Kernels(LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


@contextmanager
def fused(model: nn.Module, having: Kernels | None = None) -> Iterator[None]:
    """Within, norms, gates and rotations are computed in fewer launches. A backward pass belongs inside, too, as it may
    compute layers again. `having`: the kernels (default: those that are there for its device)."""
    having = having or kernels(next(model.parameters()).device.type)
    own = [module for module in model.modules() if "forward" not in vars(module)]
    changed = {module: MethodType(_norm, module) for module in own if type(module).__name__ in NORMS}
    if having.gated is not None:
        gates = [module for module in own if type(module).__name__ in GATES and _is_silu(module.act_fn)]
        changed |= {gate: MethodType(_gated(having.gated), gate) for gate in gates}
    homes = {sys.modules[type(module).__module__] for module in own if type(module).__name__ in GATES}
    functions = {home: getattr(home, ROTATE) for home in homes} if having.rotated else {}
    try:
        for home, rotate in functions.items():
            setattr(home, ROTATE, _rotation(having.rotated or rotate, rotate))
        with forwards(changed):
            yield
    finally:
        for home, rotate in functions.items():
            setattr(home, ROTATE, rotate)


def _is_silu(activation: object) -> bool:
    from transformers.activations import ACT2FN

    return isinstance(activation, nn.SiLU | type(ACT2FN["silu"]))


def _norm(self: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
    if hidden_states.dtype != self.weight.dtype:  # then the own code has another result's dtype
        return type(self).forward(self, hidden_states)
    with torch.autocast(hidden_states.device.type, enabled=False):
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def _gated(kernel: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(kernel(gate, up) if gate.dtype == up.dtype else self.act_fn(gate) * up)

    return forward


def _rotation(kernel: Rotate, own: Rotate) -> Rotate:
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim != 1 or not q.dtype == k.dtype == cos.dtype or q.shape[-1] != cos.shape[-1]:
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return kernel(q, k, cos, sin)

    return rotate
