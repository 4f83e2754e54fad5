"""What fits into the device's memory: token budgets, retries with half of it, recomputed activations, what training
takes; and what lies there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from llm_fed.basics import cgroups
from llm_fed.basics.errors import RunError
from llm_fed.engine.layers import forwards

Result = TypeVar("Result")
Item = TypeVar("Item")


def budget_and_overhead(device: torch.device) -> tuple[int, int]:
    """Most tokens of a micro-batch, and what one more micro-batch costs in tokens. On the CPU as measured
    (docs/results/log/performance.md); elsewhere reasoned, not measured."""
    return (1024, 32) if device.type == "cpu" else (16384, 512)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that memory does not suffice, in torch's words or a driver's, which have no full stop."""
    from accelerate.utils.memory import should_reduce_batch_size

    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or "error: out of memory" in str(error)


def within_memory(run: Callable[[int], Result], budget: int, free: Callable[[], None] = lambda: None) -> Result:
    """`run(budget)`, with half the budget as often as the device's memory does not suffice. `free`: gives memory back
    before the next attempt. RunError: it does not suffice for one example."""
    from accelerate.utils.memory import clear_device_cache

    while True:
        try:
            return run(budget)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if budget <= 1:
                raise RunError(
                    "out of memory even with one example at a time; use a smaller base, or for text "
                    "base.activation_checkpointing, base.quantization or a smaller task.max_length"
                ) from error
        free()  # by now nothing holds the tensors of the attempt that failed
        clear_device_cache(garbage_collection=True)
        budget //= 2


def activation_checkpointing(model: nn.Module) -> AbstractContextManager[None]:
    """Recompute activations in the layers where `model.gradient_checkpointing_enable()` requested it. Transformers
    itself does so in training mode alone, which would also turn the base's dropout on."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    return forwards({layer: partial(again, layer.forward) for layer in recomputed(model)})


def recomputed(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers whose activations are computed again."""
    return [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]


def is_spread(model: nn.Module) -> bool:
    """Whether the layers of a model lie on several devices."""
    return len({parameter.device for parameter in model.parameters()}) > 1


def free_memory(device: torch.device) -> int:
    """Bytes; of a GPU with those that torch has reserved, of a CPU within the limits of its container or job."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(device))  # less where several share it
        return min(free + torch.cuda.memory_reserved(device), allowed) - torch.cuda.memory_allocated(device)
    return cgroups.free_memory()[0]


def memory_limit(device: torch.device) -> str:
    """What allows less memory than the machine has free, in words; empty of a GPU, and where nothing does."""
    _, limit = cgroups.free_memory() if device.type != "cuda" else (0, None)
    return "" if limit is None else limit.name


def on_device(item: Item, device: torch.device) -> Item:
    """A dataclass of the host with its tensors on a device, also those of dataclasses in it; nobody waits for it."""
    if device.type == "cpu":
        return item
    return _mapped(item, lambda tensor: _pinned(tensor, device).to(device, non_blocking=True))


class Static(Generic[Item]):
    """Memory of a device that takes the tensors of one dataclass after another, all of equal shapes. `item`: the
    dataclass with its tensors there, always the same ones."""

    def __init__(self, like: Item, device: torch.device):
        self.item = _mapped(like, lambda tensor: torch.zeros_like(tensor, device=device))
        self._own = list(_tensors(self.item))

    def fill(self, item: Item) -> None:
        """Copy what lies on the host, without waiting for it."""
        for own, given in zip(self._own, _tensors(item), strict=True):
            own.copy_(_pinned(given, own.device), non_blocking=True)


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    """In memory of the host from which a GPU can copy by itself."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


def _mapped(item: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(item, Tensor):
        return change(item)
    if is_dataclass(item) and not isinstance(item, type):
        return replace(item, **{field.name: _mapped(getattr(item, field.name), change) for field in fields(item)})
    return item


def _tensors(item: Any) -> Iterator[Tensor]:
    if isinstance(item, Tensor):
        yield item
    elif is_dataclass(item) and not isinstance(item, type):
        for field in fields(item):
            yield from _tensors(getattr(item, field.name))


def weights(modules: Iterable[nn.Module]) -> int:
    """Bytes of the parameters and buffers of models, as they are held: quantised ones packed, without their scales."""
    held = {id(tensor): tensor for module in modules for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in held.values())


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
    """Within, counts the storages that are made, while something holds them. `peak`: most bytes alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Result],
        types: Sequence[type],
        args: Sequence[Tensor | float] = (),
        kwargs: Mapping[str, Tensor | float] | None = None,
    ) -> Result:
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
