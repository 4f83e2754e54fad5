"""The forward and backward pass of training, and how a micro-batch lies in it: in rows with padding, or end to end
without.

Shape letters: K rows of a bank, N rows of a micro-batch, n losses, P parameters, G adapters, E experts, C classes or
words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from llm_fed.engine import end_to_end, packing
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.end_to_end import FAMILIES, NAME, FlatBatch, attend, attending, flattened
from llm_fed.engine.examples import Batch, Examples, Item
from llm_fed.engine.fused import fused
from llm_fed.engine.layers import DeltaHook, TokenGroups, groups_of
from llm_fed.engine.memory import is_spread
from llm_fed.engine.packing import Grid, MicroBatch, TokenSequence, repeated
from llm_fed.merge.delta import under
from llm_fed.method.requests import Fit
from llm_fed.models.rotary import regimes


@dataclass(frozen=True)
class PassInputs:
    """A micro-batch of N rows and n losses with all that the device is given for it.

    Where its examples lie end to end, `groups` says which tokens go through which of the G adapters of `index` (G,),
    and `mix` is (tokens, E).
    """

    batch: Batch
    index: Tensor  # (N,) the row of the bank that each goes through
    owner: Tensor  # (n,) the same of each loss
    weights: Tensor  # (n,) what each loss counts
    into: Tensor  # (N,) the example that each row belongs to
    owners: Sequence[int]  # the row of the bank of each example, for the host
    mix: Tensor | None = None  # (N, E)
    masks: Tensor | None = None  # of dropout
    wanted: Tensor | None = None  # (targets, C) the teachers' logits
    below: Mapping[str, DeltaHook] = field(default_factory=dict)  # what lies beneath the adapters, by layer
    groups: TokenGroups | None = None


def inputs_of(
    of: Examples[Item, Batch],
    examples: Sequence[Item],
    owners: Sequence[int],
    weights: Tensor,
    mix: Tensor | None = None,
    drifts: Tensor | None = None,
    *,
    flat: bool = False,
) -> PassInputs:
    """A micro-batch on the host.

    Args:
        examples: those of one client side by side.
        owners: the client of each.
        weights: (examples,) what the losses of each count.
        mix: (examples, E), where the gate is `mix`.
        drifts: (examples,) z of KTO.
        flat: texts lie end to end in one row, and not in rows with padding.
    """
    owner = torch.tensor(owners)
    if flat:
        batch = flattened(cast(Sequence[TokenSequence], examples))
        clients, groups = groups_of(owners, [of.length(example) for example in examples])
        if mix is not None:
            mix = mix[[owners.index(k) for k in clients]][groups.of]
        index, into = torch.tensor(clients), torch.arange(len(clients))
        return PassInputs(batch, index, owner[batch.rows], weights[batch.rows], into, owners, mix, groups=groups)
    beside = of.collate(examples)
    if drifts is not None:
        beside = replace(beside, drift=drifts)
    index, into = of.by_row(owner), of.by_row(torch.arange(len(owner)))
    mix = None if mix is None else of.by_row(mix)
    return PassInputs(beside, index, owner[beside.rows], weights[beside.rows], into, owners, mix)


def widened(inputs: PassInputs, grid: Grid, longest: int) -> PassInputs:
    """The inputs in a shape of the grid. Further rows, or tokens, are of the last client, and further targets weigh
    nothing. `longest`: tokens of the longest text of all batches that should have few shapes."""
    batch, groups, rows = inputs.batch, inputs.groups, len(inputs.index)
    if isinstance(batch, FlatBatch) and groups is not None:
        batch = end_to_end.widened(batch, grid, longest)
        wide, ends = batch.input_ids.shape[1], groups.ends.clone()
        ends[-1] = wide
        groups = replace(groups, ends=ends, of=repeated(groups.of, wide))
    else:
        assert isinstance(batch, MicroBatch)
        batch = packing.widened(batch, grid)
        wide = rows = len(batch.input_ids)
    targets = len(batch.labels)
    return replace(
        inputs,
        batch=batch,
        index=repeated(inputs.index, rows),
        owner=repeated(inputs.owner, targets),
        weights=nn.functional.pad(inputs.weights, (0, targets - len(inputs.weights))),
        into=repeated(inputs.into, rows),
        owners=(),
        mix=None if inputs.mix is None else repeated(inputs.mix, wide),
        groups=groups,
    )


def refusal(model: AdaptedModel, jobs: Sequence[Fit]) -> str:
    """Why these jobs' passes are as they are written; empty where they can be captured, and have no padding."""
    base, structure = model.model, model.structure
    family = base.config.model_type if isinstance(base, PreTrainedModel) else type(base).__name__
    reasons = {
        "only texts have batches of fixed shapes, and not pictures, labels or preferences": not model.examples.fixed,
        "teachers answer for each example": bool(jobs[0].teachers),
        "a method's own loss may ask the device for values": any(callable(job.loss) for job in jobs),
        "privacy.unit=example needs the gradients of single examples": jobs[0].private is not None,
        "frozen weights lie beneath the adapters": structure.delta or any(under(job.start) for job in jobs),
        "a head is trained whole beside the adapters": bool(structure.whole),
        "the experts of a mixture have adapters (adapter.target_parameters)": bool(structure.parameters),
        "the base lies on several devices": is_spread(base),
        "the base is quantised": not all(each.is_floating_point() for each in base.parameters()),
        f"nobody has compared {family} so": family not in FAMILIES,
        "the base's positions depend on the length of each text": regimes(base) is not None,
    }
    return next((why for why, holds in reasons.items() if holds), "")


def one_pass(
    model: AdaptedModel,
    bank: AdapterBank,
    inputs: PassInputs,
    losses: Tensor,
    each: Tensor | None = None,
    own: Callable[[PassInputs, Tensor], Tensor] | None = None,
) -> None:
    """Add the gradients of a micro-batch on the device to the bank's. It reads nothing of the host's memory but for
    `own`, so that a graph can hold it.

    Args:
        losses: (K,) to which the weighted losses are added.
        each: (examples, P) that takes the gradients of single examples, instead of the bank.
        own: losses (n,) of the inputs and logits (n, C), instead of the examples' own.
    """
    bank_in_place = bank.attached(
        inputs.index, inputs.masks, inputs.mix, each=each, into=inputs.into, below=inputs.below, groups=inputs.groups
    )
    flat = attending(model.model, NAME, attend) if isinstance(inputs.batch, FlatBatch) else nullcontext()
    with fused(model.model) if model.fuses else nullcontext(), flat, bank_in_place:
        with model.computing():
            if own:
                logits = model.examples.logits(model.model, inputs.batch, all_rows=bank.adapts_head)
                loss = own(inputs, logits)
            else:
                loss = model.examples.losses(model.model, inputs.batch, all_rows=bank.adapts_head, wanted=inputs.wanted)
            loss = loss * inputs.weights.to(loss.dtype)
        losses.index_add_(0, inputs.owner, loss.detach().to(losses.dtype))
        loss.sum().backward()
