"""What training takes of the device's memory, estimated before it begins: weights, optimizer state, activations.

Activations come from `formula` where that holds, and elsewhere from two small micro-batches that are run.

Letters: n tokens or pictures of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.engine import formula
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import Examples
from llm_fed.engine.memory import activation_checkpointing, budget_and_overhead
from llm_fed.engine.trainable import Trainable
from llm_fed.method.optimizer import MOMENTS
from llm_fed.method.site import Site
from llm_fed.models.joined import full
from llm_fed.models.lora import Lora
from llm_fed.models.trained import Structure
from llm_fed.settings.config import LocalConfig
from llm_fed.tasks.common import Encoded

_MEASURED = 16  # tokens; twice as many and this many give a constant part and one that grows


@dataclass(frozen=True)
class Activations:
    """Bytes that training holds for a backward pass, without the model's weights and the adapters themselves.

    Attributes:
        largest, smallest: at the most, in the largest micro-batch, and in one of a single example: what remains where
            micro-batches are made smaller because memory does not suffice.
        token: what each further token adds; None: not predicted, and the others were measured.
    """

    largest: int
    smallest: int
    token: int | None = None


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


def activations(base: Trainable, site: Site, local: LocalConfig, per_pass: int) -> Activations:
    """What a backward pass keeps at the most.

    Args:
        site: with the longest examples.
        per_pass: clients in a fused pass.
    """
    structure: Any = site.structure
    its = base.examples(structure)
    if not structure.fused:
        size = min(local.batch_size, len(site.train))
        pictures = [site.train[i % len(site.train)] for i in range(4)]
        few, more = (_of_whole_model(base, structure, pictures[:n]) for n in (2, 4))
        whole = max(0, few + (more - few) * (size - 2) // 2)
        return Activations(whole, whole)  # its batches are not divided
    longest = max(site.train, key=its.length)
    length, (budget, _) = its.length(longest), budget_and_overhead(base.device)
    rows = max(1, min(budget // length, per_pass * min(local.batch_size, len(site.train))))
    if isinstance(longest, Encoded):
        checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in base.model.modules())
        found = formula.kept(base.model, structure, base.autocast, checkpointed)
        if found is not None:
            targets = its.num_targets([longest])
            if site.private is not None:  # a gradient of its own for each example
                found = replace(found, row=found.row + 4 * base.layout(structure).size)
            largest, smallest = (found.peak(n, length, n * targets) for n in (rows, 1))
            return Activations(largest, smallest, found.token)
        few, more = (_of_adapters(base, structure, its, [_cut(longest, n)]) for n in (_MEASURED, 2 * _MEASURED))
        token = max(0, more - few) // _MEASURED
        largest, smallest = (few + token * (n * length - _MEASURED) for n in (rows, 1))
        return Activations(max(0, largest), max(0, smallest))
    few, more = (_of_adapters(base, structure, its, [longest] * n) for n in (1, 2))
    return Activations(max(0, few + (more - few) * (rows - 1)), few)


def _cut(example: Encoded, length: int) -> Encoded:
    """An example of so many tokens with the same share of targets."""
    ids = [example.input_ids[i % len(example.input_ids)] for i in range(length)]
    targets = max(1, round(length * sum(example.target) / len(example.target)))
    return Encoded(ids, [i >= length - targets and i > 0 for i in range(length)])


def _of_adapters(base: Trainable, structure: Lora, its: Examples, examples: Sequence[Any]) -> int:
    bank, model = AdapterBank(base.model, structure, 1), base.model
    batch, count = its.collate(examples), len(examples)
    masks = bank.draw_masks([0] * count, [its.length(example) for example in examples])
    mix = torch.full((count, len(structure.experts)), 1.0) if structure.gate == "mix" else None

    def loss() -> Tensor:
        index = torch.zeros(count, dtype=torch.int64)
        with bank.attached(index, masks, mix), activation_checkpointing(model), base.computing():
            return its.losses(model, batch, all_rows=bank.adapts_head).sum()

    return _saved(loss, [*model.parameters(), *model.buffers(), bank.rows])


def _of_whole_model(base: Trainable, structure: Structure, pictures: Sequence[Any]) -> int:
    flat, its = base.flat(structure), base.examples(structure)
    flat.module.train()
    batch, devices = its.collate(pictures), range(torch.cuda.device_count())

    def loss() -> Tensor:
        with torch.random.fork_rng(devices=devices), base.computing():  # dropout draws
            answer = its.answer(flat.module, batch)
        return nn.functional.cross_entropy(full(answer.logits), batch.labels.to(base.device))

    return _saved(loss, [flat.row, *flat.module.buffers()])


def _saved(loss: Callable[[], Tensor], known: Sequence[Tensor]) -> int:
    """Bytes that autograd saves for the backward pass of a loss, but for what is known."""
    kept: dict[int, Tensor] = {}  # by storage; holding them keeps their addresses apart
    ignored = {tensor.untyped_storage().data_ptr() for tensor in known}

    def pack(tensor: Tensor) -> Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in ignored:
            kept.setdefault(place, tensor)
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
