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
from llm_fed.engine.end_to_end import FAMILIES, FlatBatch, attention, flattened, quantised
from llm_fed.engine.examples import Examples
from llm_fed.engine.fused import fused
from llm_fed.engine.memory import is_spread
from llm_fed.engine.on_device import on_device
from llm_fed.engine.packing import Grid, filled, padded_tokens, plan, repeated
from llm_fed.engine.tokens import TokenGroups, groups_of
from llm_fed.merge.delta import under
from llm_fed.method.requests import Fit
from llm_fed.models.rotary import regimes


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
    masks: Tensor | None = None  # of dropout
    wanted: Tensor | None = None  # (targets, C) the teachers' logits
    below: Mapping[str, DeltaHook] = field(default_factory=dict)  # what lies beneath the adapters, by layer
    groups: TokenGroups | None = None


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

    def inputs(
        self, examples: Sequence[Any], owners: Sequence[int], weights: Tensor, mix: Tensor | None, drifts: Tensor | None
    ) -> PassInputs:
        """A micro-batch on the host.

        Args:
            examples: those of one client side by side.
            owners: the client of each.
            weights: (examples,) what the losses of each count.
            mix: (examples, E), where the gate is `mix`.
            drifts: (examples,) z of KTO.
        """
        of, owner, batch = self.of, torch.tensor(owners), self.of.collate(examples)
        if drifts is not None:
            batch = replace(batch, drift=drifts)
        return PassInputs(
            batch, of.by_row(owner), owner[batch.rows], weights[batch.rows], of.by_row(torch.arange(len(owner))),
            owners, mix=None if mix is None else of.by_row(mix),
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

    def inputs(
        self, examples: Sequence[Any], owners: Sequence[int], weights: Tensor, mix: Tensor | None, drifts: Tensor | None
    ) -> PassInputs:
        batch, owner = flattened(examples), torch.tensor(owners)
        clients, groups = groups_of(owners, [len(example.input_ids) for example in examples])
        return PassInputs(
            batch, torch.tensor(clients), owner[batch.rows], weights[batch.rows], torch.arange(len(clients)), owners,
            mix=None if mix is None else mix[[owners.index(k) for k in clients]][groups.of], groups=groups,
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
        groups = replace(groups, ends=ends, of=repeated(groups.of, tokens))
        mix = None if inputs.mix is None else repeated(inputs.mix, tokens)
        return replace(_with_targets(inputs, len(batch.labels)), batch=batch, groups=groups, mix=mix)


def _with_targets(inputs: PassInputs, targets: int) -> PassInputs:
    weights = torch.nn.functional.pad(inputs.weights, (0, targets - len(inputs.weights)))
    return replace(inputs, owner=repeated(inputs.owner, targets), weights=weights, owners=())


def refusal(model: AdaptedModel, jobs: Sequence[Fit]) -> str:
    """Why the passes of these jobs are as they are written; empty where they can be captured, and texts lie end to
    end."""
    base, structure = model.model, model.structure
    family = getattr(getattr(base, "config", None), "model_type", "such a model")
    for why, holds in {
        "only texts have batches of fixed shapes, and not pictures, labels or preferences": not model.examples.fixed,
        "teachers answer for each example": bool(jobs[0].teachers),
        "a method's own loss may ask the device for values": any(callable(job.loss) for job in jobs),
        "privacy.unit=example needs the gradients of single examples": jobs[0].private is not None,
        "frozen weights lie beneath the adapters": structure.delta or any(under(job.start) for job in jobs),
        "a head is trained whole beside the adapters": bool(structure.whole),
        "the experts of a mixture have adapters (adapter.target_parameters)": bool(structure.parameters),
        "the base lies on several devices": is_spread(base),
        "the base is quantised": quantised(base),
        f"nobody has compared {family} so": family not in FAMILIES,
        "the base's positions depend on the length of each text": regimes(base) is not None,
    }.items():
        if holds:
            return why
    return ""


class Pass:
    """The passes of a fit.

    Attributes:
        grid: of the shapes of micro-batches; None: they have any.
        layout: how examples lie.
    """

    grid: Grid | None = None

    def __init__(self, model: AdaptedModel, bank: AdapterBank, layout: Padded):
        self.model, self.bank, self.layout = model, bank, layout

    @property
    def why(self) -> str:
        """Some micro-batches are not replayed though that is requested; empty where all are, or none need be."""
        return ""

    def begin(self) -> None:
        """A step."""

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
        one_pass(self.model, self.bank, inputs, losses, each, own)
        return False

    def end(self, losses: Tensor) -> None:
        """All micro-batches of a step were taken; `losses` (K,) as given to each."""


def one_pass(
    model: AdaptedModel,
    bank: AdapterBank,
    inputs: PassInputs,
    losses: Tensor,
    each: Tensor | None = None,
    own: Callable[[PassInputs, Tensor], Tensor] | None = None,
) -> None:
    """Add the gradients of a micro-batch to the bank's, or to `each`. It reads nothing of the host's memory but for
    `own`, so that a graph can hold it. Arguments as of `Pass.take`."""
    bank_in_place = bank.attached(
        inputs.index, inputs.masks, inputs.mix, each=each, into=inputs.into, below=inputs.below, groups=inputs.groups
    )
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
        loss.sum().backward()
