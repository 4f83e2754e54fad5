"""The forward and backward passes of training, and how a micro-batch lies in them: in rows with padding, or end to end
without. A pass runs as it is written; `capture` wraps it.

Shape letters: K rows of a bank, N rows of a micro-batch, T tokens, n losses, P parameters, G adapters, E experts, C
classes or words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from llm_fed.engine import end_to_end, packing
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.deltas import DeltaHook
from llm_fed.engine.end_to_end import FlatBatch, attention, flattened
from llm_fed.engine.examples import Examples
from llm_fed.engine.fused import fused
from llm_fed.engine.on_device import on_device
from llm_fed.engine.packing import Grid, filled, padded_tokens, plan, repeated
from llm_fed.engine.tokens import TokenGroups, groups_of
from llm_fed.method.requests import Fit


@dataclass(frozen=True)
class PassInputs:
    """A micro-batch of N rows and n losses with all that the device is given for it.

    Where its examples lie end to end, `groups` says which tokens go through which of the G adapters of `index` (G,),
    and `mix` is (tokens, E).
    """

    batch: Any  # `examples.Batch`
    index: Tensor  # (N,) the row of the bank that each goes through
    owner: Tensor  # (n,) the same of each loss
    weights: Tensor  # (n,) what each loss counts
    into: Tensor  # (N,) the example that each row belongs to
    owners: Sequence[int]  # the row of the bank of each example, for the host
    mix: Tensor | None = None  # (N, E)
    columns: Tensor | None = None  # (examples, numbers): what a loss of one's own is given, see `own_losses`
    masks: Tensor | None = None  # of dropout
    wanted: Tensor | None = None  # (targets, C) the teachers' logits
    below: Mapping[str, DeltaHook] = field(default_factory=dict)  # what lies beneath the adapters, by layer
    groups: TokenGroups | None = None


@dataclass(frozen=True)
class Chosen:
    """Examples of a micro-batch, those of one client side by side.

    Attributes:
        examples: (client, example).
        weights: (examples,) what the losses of each count.
        mix: (examples, E), where the gate is `mix`.
        columns: see `PassInputs`.
        drifts: z of KTO, by client.
    """

    examples: Sequence[tuple[int, Any]]
    weights: Tensor
    mix: Tensor | None = None
    columns: Tensor | None = None
    drifts: Mapping[int, float] = field(default_factory=dict)

    @property
    def owners(self) -> list[int]:
        return [k for k, _ in self.examples]


class Padded:
    """Examples side by side, padded on the right."""

    flat = False

    def __init__(self, of: Examples):
        self.of = of

    def divided(
        self, lengths: Sequence[int], budget: int, overhead: int, grid: Grid | None
    ) -> tuple[list[list[int]], int]:
        """The micro-batches of examples of these lengths, and their tokens with padding."""
        batches = plan(lengths, budget, overhead, grid)
        return batches, padded_tokens(lengths, batches, grid)

    def inputs(self, chosen: Chosen) -> PassInputs:
        """On the host."""
        of, owner = self.of, torch.tensor(chosen.owners)
        batch = of.collate([example for _, example in chosen.examples])
        if chosen.drifts:
            drift = torch.tensor([chosen.drifts[k] for k in chosen.owners], dtype=torch.float64)
            batch = replace(batch, drift=drift)
        return PassInputs(
            batch, of.by_row(owner), owner[batch.rows], chosen.weights[batch.rows],
            of.by_row(torch.arange(len(owner))), chosen.owners,
            mix=None if chosen.mix is None else of.by_row(chosen.mix), columns=chosen.columns,
        )  # fmt: skip

    def widened(self, inputs: PassInputs, grid: Grid, longest: int) -> PassInputs:
        """The same in a shape of the grid; further rows repeat the last one, and further targets weigh nothing."""
        batch = packing.widened(inputs.batch, grid)
        rows = len(batch.input_ids)
        mix = None if inputs.mix is None else repeated(inputs.mix, rows)
        return replace(
            _with_targets(inputs, len(batch.labels)), batch=batch, index=repeated(inputs.index, rows),
            into=repeated(inputs.into, rows), mix=mix,
        )  # fmt: skip


class Flat(Padded):
    """Texts end to end in one row, client by client."""

    flat = True

    def divided(
        self, lengths: Sequence[int], budget: int, overhead: int, grid: Grid | None
    ) -> tuple[list[list[int]], int]:
        batches = filled(lengths, budget)
        sums = [sum(lengths[i] for i in batch) for batch in batches]
        return batches, sum(map(grid.end_to_end, sums) if grid else sums)

    def inputs(self, chosen: Chosen) -> PassInputs:
        batch = flattened([example for _, example in chosen.examples])
        clients, groups = groups_of(chosen.owners, [len(example.input_ids) for _, example in chosen.examples])
        owner, mix = torch.tensor(chosen.owners), None
        if chosen.mix is not None:
            first = [chosen.owners.index(k) for k in clients]
            mix = chosen.mix[first][groups.of]
        return PassInputs(
            batch, torch.tensor(clients), owner[batch.rows], chosen.weights[batch.rows],
            torch.arange(len(clients)), chosen.owners, mix=mix, columns=chosen.columns, groups=groups,
        )  # fmt: skip

    def widened(self, inputs: PassInputs, grid: Grid, longest: int) -> PassInputs:
        """Further tokens belong to the last client.

        Args:
            longest: tokens of the longest text of all batches that should have few shapes.
        """
        groups, batch = inputs.groups, end_to_end.widened(inputs.batch, grid, longest)
        assert groups is not None
        tokens = batch.input_ids.shape[1]
        ends = groups.ends.clone()
        ends[-1] = tokens
        groups = replace(groups, ends=ends, of=repeated(groups.of, tokens), known=None)
        mix = None if inputs.mix is None else repeated(inputs.mix, tokens)
        return replace(_with_targets(inputs, len(batch.labels)), batch=batch, groups=groups, mix=mix)


def _with_targets(inputs: PassInputs, targets: int) -> PassInputs:
    weights = torch.nn.functional.pad(inputs.weights, (0, targets - len(inputs.weights)))
    return replace(inputs, owner=repeated(inputs.owner, targets), weights=weights, owners=())


def layout_of(model: AdaptedModel, jobs: Sequence[Fit]) -> tuple[Padded, str]:
    """How the examples of these fits lie, and why they are padded where padding need not be."""
    if not model.padding_free:
        return Padded(model.examples), ""
    why = "teachers answer for each example" if jobs[0].teachers else ""
    if jobs[0].private is not None:
        why = "privacy.unit=example needs the gradients of single examples, which lie in rows of their own"
    why = why or end_to_end.refusal(model.model, model.structure, texts=model.examples.fixed)
    return (Padded if why else Flat)(model.examples), why


class Pass:
    """The passes of a fit.

    Attributes:
        grid: of the shapes of micro-batches; None: they have any.
        why: some micro-batches are not replayed though that is requested; empty where all are, or none need be.
        layout: how examples lie.
    """

    grid: Grid | None = None
    why = ""

    def __init__(self, model: AdaptedModel, bank: AdapterBank, layout: Padded):
        self.model, self.bank, self.layout = model, bank, layout
        self.scales: Tensor | None = None

    def begin(self, scales: Tensor | None) -> None:
        """A step, in float16 with the scale (K,) of each client's loss."""
        self.scales = scales

    def take(
        self,
        inputs: PassInputs,
        seeds: Sequence[int],
        sizes: Sequence[int],
        losses: Tensor,
        each: Tensor | None = None,
        own: Callable[[PassInputs, Tensor], Tensor] | None = None,
        taught: Callable[[Any], Tensor | None] | None = None,
    ) -> bool:
        """The pass over a micro-batch of the host; whether it was replayed.

        Args:
            seeds, sizes: of the dropout masks of its rows.
            losses: (K,) to which the weighted losses are added.
            each: (examples, P) that takes the gradients of single examples, instead of the bank.
            own: losses (n,) of the inputs and logits (n, C), instead of the examples' own.
            taught: what teachers answer to a batch on the device.
        """
        inputs = on_device(inputs, losses.device)
        masks = self.bank.draw_masks(seeds, sizes, end_to_end=self.layout.flat)
        rows = self.layout.of.by_row(torch.tensor(inputs.owners)).tolist()
        wanted = taught(inputs.batch) if taught else None
        inputs = replace(inputs, masks=masks, below=self.bank.beneath(rows), wanted=wanted)
        one_pass(self.model, self.bank, inputs, self.scales, losses, each, own)
        return False

    def end(self, losses: Tensor) -> None:
        """All micro-batches of a step were taken; `losses` (K,) as given to each."""


def one_pass(
    model: AdaptedModel,
    bank: AdapterBank,
    inputs: PassInputs,
    scales: Tensor | None,
    losses: Tensor,
    each: Tensor | None = None,
    own: Callable[[PassInputs, Tensor], Tensor] | None = None,
) -> None:
    """Add the gradients of a micro-batch to the bank's, or to `each`. It reads nothing of the host's memory but for
    `own`, so that a graph can hold it. Arguments as of `Pass.take`."""
    at_once = model.captures is not None or inputs.groups is not None
    bank_in_place = bank.attached(
        inputs.index, inputs.masks, inputs.mix, each=each, into=inputs.into, below=inputs.below, groups=inputs.groups,
        cast=model.autocast if at_once and not bank.structure.dora else None,
    )  # fmt: skip
    flat = attention(model.model) if isinstance(inputs.batch, FlatBatch) else nullcontext()
    with fused(model.model) if model.fuses else nullcontext(), flat, bank_in_place:
        with model.computing():
            if own:
                logits = model.examples.logits(model.model, inputs.batch, all_rows=bank.adapts_head)
                loss = own(inputs, logits)
            else:
                loss = model.examples.losses(
                    model.model, inputs.batch, all_rows=bank.adapts_head, wanted=inputs.wanted
                )  # fmt: skip
            loss = loss * inputs.weights.to(loss.dtype)
        losses.index_add_(0, inputs.owner, loss.detach().to(losses.dtype))
        (loss if scales is None else loss * scales[inputs.owner]).sum().backward()
