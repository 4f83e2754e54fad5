"""Bytes that are alive while something runs: what a memory formula is measured against, on any device."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Within, counts the storages that operations of torch make, each once, until nothing holds it any more.

    Attributes:
        peak: the most bytes that were alive at once, after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and (place := id_of(leaf)) not in known:
                storage = leaf.untyped_storage()
                self._made[place] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, self.alive())
        return found

    def alive(self) -> int:
        """Bytes that are alive now."""
        self._made = {place: made for place, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def id_of(tensor: torch.Tensor) -> int:
    """Equal for tensors that share their memory."""
    return tensor.untyped_storage()._cdata
