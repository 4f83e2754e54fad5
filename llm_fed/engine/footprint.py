"""What training and answers take of the device's memory, estimated before it is taken: weights, optimizer state,
activations, caches.

Activations come from a step on tensors without values (torch's `FakeTensorMode`), so a base of any size is measured
without computing, and without the memory that it would take. Where a family's passes depend on values, one example is
computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.dropout import mask_keys
from llm_fed.engine.end_to_end import attention, flattened
from llm_fed.engine.laid import on_device
from llm_fed.engine.masks import known_masks
from llm_fed.engine.memory import activation_checkpointing, budget_and_overhead
from llm_fed.engine.packing import Grid
from llm_fed.engine.tokens import groups_of
from llm_fed.engine.trainable import Trainable
from llm_fed.method.client import Client
from llm_fed.method.optimizer import MOMENTS
from llm_fed.models.base import Base
from llm_fed.models.rotary import context
from llm_fed.models.trained import Structure
from llm_fed.settings.config import LocalConfig

INPUTS = 60  # bytes of a captured pass for each token, at most: its number and place, and as a target


@dataclass(frozen=True)
class Activations:
    """Bytes that training holds for a backward pass, without the model's weights and the adapters themselves.

    Attributes:
        largest, smallest: at the most, in the largest micro-batch, and in one of a single example: what remains where
            micro-batches are made smaller because memory does not suffice.
        token: what each further token adds; None of whole models, whose batches are not divided.
        graphs: what captured passes keep beside that between replays: the memory of their graphs, which all shapes
            share, and the inputs of the largest. Reasoned, and not compared with a GPU.
    """

    largest: int
    smallest: int
    token: int | None = None
    graphs: int = 0


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


def activations(
    base: Trainable,
    site: Client,
    local: LocalConfig,
    per_pass: int,
    *,
    end_to_end: bool = False,
    captured: bool = False,
    keyed_masks: bool = False,
) -> Activations:
    """What a micro-batch holds at the most.

    Args:
        site: with the longest examples.
        per_pass: clients in a fused pass.
        end_to_end: whether examples lie end to end, without padding.
        captured: whether graphs are kept of passes.
        keyed_masks: whether dropout masks are computed from keys.
    """
    its, size = base.examples(site.structure), min(local.batch_size, len(site.train))
    longest = max(site.train, key=its.length)
    if not site.structure.fused:  # its batches are not divided
        whole = _whole_model(base, site.structure, [longest] * size)
        return Activations(whole, whole)
    length, (budget, _) = its.length(longest), budget_and_overhead(base.device)
    rows = max(1, min(budget // length, per_pass * size))
    measured = partial(_adapters, base, site, clients=per_pass if end_to_end else None, keyed_masks=keyed_masks)
    try:
        largest, smallest = (measured([longest] * count) for count in (rows, 1))
    except RuntimeError:
        smallest = measured([longest], values=True)
        largest = rows * smallest
    token = (largest - smallest) // max(1, (rows - 1) * length) or smallest // length
    graphs = 0
    if captured and its.fixed and not site.private:
        grid = Grid(context(base.model.config))
        wide = grid.end_to_end(rows * length) if end_to_end else grid.rows(rows) * grid.tokens(length)
        graphs = largest + token * (wide - rows * length) + INPUTS * wide
    return Activations(largest, smallest, token, graphs)


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


def cache(base: Base) -> int:
    """Bytes that each further token of an answer keeps."""
    try:
        return _cache(base)
    except RuntimeError:
        return _cache(base, values=True)


def _cache(base: Base, values: bool = False) -> int:
    held = []
    with _tensors_of(values) as fake, torch.no_grad(), base.computing(), _Alive(fake, base.model):
        for length in (16, 32):
            ids = torch.ones(1, length, dtype=torch.int64, device=base.device)
            layers = base.model(input_ids=ids, use_cache=True).past_key_values.layers
            held.append(sum(part.nbytes for layer in layers for part in _tensors(layer)))
    return (held[1] - held[0]) // 16


def _adapters(
    base: Trainable,
    site: Client,
    examples: Sequence[Any],
    *,
    clients: int | None,
    keyed_masks: bool,
    values: bool = False,
) -> int:
    """The most that a forward and backward pass of these examples holds, but for model and adapters, in bytes.

    Args:
        clients: whose examples lie end to end; None: they lie in rows.
        values: whether it is computed.
    """
    structure: Any = site.structure
    its, model, count = base.examples(structure), base.model, len(examples)
    sizes = [size for example in examples for size in its.sizes(example)]
    groups = None if clients is None else groups_of(sorted(n % clients for n in range(count)), sizes)[1]
    batch: Any = its.collate(examples) if groups is None else flattened(examples)
    groups = groups and on_device(groups, base.device)
    rows, given = (len(sizes), len(sizes)) if groups is None else (len(groups.ends), sum(sizes))
    seeds, flat = [0] * len(sizes), groups is not None
    keys = mask_keys(seeds, sizes, end_to_end=flat) if keyed_masks else None  # which are looked through, so of values
    with _tensors_of(values) as fake, attention(model) if groups else nullcontext():
        bank, batch = AdapterBank(model, structure, 1), on_device(batch, base.device)
        with _Alive(fake, model) as alive:
            if keys is not None and bank.drops:
                masks: Any = on_device(keys, base.device)
            else:
                masks = bank.draw_masks(seeds, sizes, end_to_end=flat)
            mix = torch.ones(given, len(structure.experts)) if structure.gate == "mix" else None
            each = bank.rows.new_zeros(count, bank.layout.size) if site.private else None
            index = torch.zeros(rows, dtype=torch.int64, device=base.device)
            into = its.by_row(torch.arange(count, device=base.device))
            attached = bank.attached(index, masks, mix, each=each, into=into, below={}, groups=groups)
            with attached, activation_checkpointing(model):
                with base.computing():
                    loss = its.losses(model, batch, all_rows=bank.adapts_head).sum()
                loss.backward()
    return alive.peak


def _whole_model(base: Trainable, structure: Structure, examples: Sequence[Any]) -> int:
    """The same of a model that is trained whole."""
    its, flat = base.examples(structure), base.flat(structure)
    batch = its.collate(examples)
    flat.module.train()
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, _Alive(fake, flat.module) as alive:
        with base.computing():
            logits = its.answer(flat.module, batch).logits
        loss = nn.functional.cross_entropy(logits.float(), batch.labels.to(logits.device))
        torch.autograd.grad(loss, list(flat.parameters.values()), allow_unused=True)
    return alive.peak


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
