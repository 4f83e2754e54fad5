"""What training and answers take of the device's memory: weights, and the peak of work that is done or pretended.

Prompts are read on tensors without values (torch's `FakeTensorMode`), which takes no memory. Where a family's passes
depend on values, one example is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from llm_fed.engine.masks import known_masks
from llm_fed.method.optimizer import MOMENTS
from llm_fed.models.base import Base
from llm_fed.models.trained import Structure
from llm_fed.settings.config import LocalConfig


def weights(modules: Iterable[nn.Module]) -> int:
    """Bytes of the parameters and buffers of models, as they are held: quantised ones packed, with their scales."""
    tensors: dict[int, Tensor] = {}
    for module in modules:
        held = [*module.parameters(), *module.buffers()]
        for tensor in [*held, *(scale for parameter in held for scale in _scales(parameter))]:
            tensors[id(tensor)] = tensor
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _scales(parameter: Tensor) -> list[Tensor]:
    """What bitsandbytes keeps beside a packed parameter: of 4 bits its state and the state's own, of 8 bits one scale
    for each row."""
    state = getattr(parameter, "quant_state", None)
    holders = [vars(parameter).get("SCB"), *(vars(s).values() for s in (state, getattr(state, "state2", None)) if s)]
    found = [each for holder in holders for each in ([holder] if isinstance(holder, Tensor) else holder or ())]
    return [each for each in found if isinstance(each, Tensor)]


def moments(local: LocalConfig) -> int:
    """How many numbers the optimizer remembers for each that it trains."""
    return MOMENTS[local.optimizer] + bool(local.momentum)


def training_copies(structure: Structure, local: LocalConfig, per_pass: int) -> int:
    """How many numbers training holds for each number of a client's state, over the clients of a pass.

    Row, gradient, the optimizer's moments and what a step adds up for all rows at once, where fused once per client;
    then what each client starts from and what it ends with.
    """
    at_once = per_pass if structure.fused else 1
    sums = 2 * bool(local.proximal) + bool(local.optimizer == "sgd" and local.weight_decay)  # anchor, drift; decayed
    return at_once * (2 + moments(local) + sums) + 2 * per_pass


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Bytes that tensors take at the most while work is done, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with _Alive(None, nn.Module()) as alive:
        work()
    return alive.peak


@dataclass(frozen=True)
class ReadingMemory:
    """Bytes for each row of a batch of prompts that is read.

    Attributes:
        peak: at the most, with what is kept of the prompt.
        token: kept of each further token.
        logits: of one token, in float32 at least.
    """

    peak: int
    token: int
    logits: int


def reading(base: Base, length: int) -> ReadingMemory:
    """What it takes to read prompts of so many tokens, padding among them, without the adapters."""
    try:
        return _reading(base, length)
    except RuntimeError:
        return _reading(base, length, values=True)


def _reading(base: Base, length: int, values: bool = False) -> ReadingMemory:
    rows, model = 2, base.model
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with _tensors_of(values) as fake, torch.no_grad(), base.computing():
        ids = torch.ones(rows, length, dtype=torch.int64, device=base.device)
        with known_masks(padded=True), _Alive(fake, model) as alive:
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True, **last)
        kept = sum(part.nbytes for layer in output.past_key_values.layers for part in _tensors(layer))
        logits = output.logits.shape[-1] * max(4, output.logits.element_size())
    return ReadingMemory(max(kept, alive.peak) // rows, -(-kept // (rows * length)), logits)


def _tensors(layer: Any) -> list[Tensor]:
    return [part for part in vars(layer).values() if isinstance(part, Tensor)]


def _plain(leaf: Any) -> Any:
    """A quantised weight as its bytes: torch 2.11 computes without values on no other kind of parameter."""
    if not isinstance(leaf, nn.Parameter) or type(leaf) is nn.Parameter:
        return leaf
    with _disable_current_modes():
        return leaf.as_subclass(Tensor)


def _tensors_of(values: bool) -> AbstractContextManager[FakeTensorMode | None]:
    """Within, tensors have values or none."""
    return nullcontext() if values else FakeTensorMode(allow_non_fake_inputs=True)


class _Alive(TorchDispatchMode):
    """Within, counts the storages that operations make, each once, until nothing holds it any more.

    Attributes:
        peak: the most bytes that were alive at once.

    Args:
        model: its tensors do not count, nor do views of them.
    """

    def __init__(self, fake: FakeTensorMode | None, model: nn.Module):
        super().__init__()
        given = (*model.parameters(), *model.buffers())
        self._given = [fake.from_tensor(tensor) if fake else tensor for tensor in given]
        self._values = fake is None
        self._known = {_place(tensor) for tensor in self._given}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} | self._known
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        grouped = func is torch.ops.aten._grouped_mm.default and not self._values
        found = _grouped(*args, **kwargs) if grouped else func(*args, **kwargs)
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (place := _place(leaf)) not in seen:
                storage = leaf.untyped_storage()
                self._made[place] = StorageWeakRef(storage), storage.nbytes()
        self._made = {place: made for place, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return found


def _grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Of the shape of a grouped product, which torch computes in several formats but plans in bfloat16 alone."""
    groups = () if a.dim() != b.dim() else (len(b),) if offs is None else (len(offs),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _place(tensor: Tensor) -> int:
    """Equal for tensors that share their memory."""
    return tensor.untyped_storage()._cdata
