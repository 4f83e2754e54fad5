"""What training takes of the device's memory: weights, and the peak of work that is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def peak_of(work: Callable[[], None], device: torch.device) -> int:
    """Bytes that tensors take at the most while work is done, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with _Alive() as alive:
        work()
    return alive.peak


class _Alive(TorchDispatchMode):
    """Within, counts the storages that operations make, each once, until nothing holds it any more.

    Attributes:
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and (location := _place(leaf)) not in seen:
                storage = leaf.untyped_storage()
                self._made[location] = StorageWeakRef(storage), storage.nbytes()
        self._made = {location: made for location, made in self._made.items() if not made[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return found


def _place(tensor: Tensor) -> int:
    """Equal for tensors that share their memory."""
    return tensor.untyped_storage()._cdata
