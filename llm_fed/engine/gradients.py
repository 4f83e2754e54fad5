"""Per-example gradients of adapters: every example is a row of the bank with a copy of its adapter, so that one
backward pass gives the gradients of a whole chunk.

Shape letters: K clients, S states of each, U examples of a chunk, N examples of a client, P parameters, E experts, n
targets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import generator
from llm_fed.engine.bank import AdaptedModel
from llm_fed.engine.memory import activation_checkpointing, free_memory, on_device
from llm_fed.engine.packing import plan
from llm_fed.merge.moments import Evidence, Moments
from llm_fed.method.requests import Gradient, GradientMoments, Item
from llm_fed.state import State, stack

# Row, gradient, the row that the layers read, its gradient, and the moments' float64 temporaries.
_COPIES = 10


def mean_gradient(model: AdaptedModel, requested: Gradient, mix: Tensor | None = None) -> tuple[float, State]:
    """The mean loss per target of the examples, and its gradient with respect to the adapter; no dropout. `mix`: (N,
    E), where the structure's gate is `mix`: the weight of each expert for each example, a constant.

    Raises:
        ClientError: no target.
        RunError: the device's memory does not suffice for one example.
    """
    examples = model.examples
    count = examples.num_targets(requested.examples)
    if not count:
        raise ClientError("the gradient of a loss was asked for, but no example has a target token")
    lengths = [examples.length(example) for example in requested.examples]

    def run(model: AdaptedModel) -> tuple[float, State]:
        bank, total = model.bank_of([requested.state]), 0.0
        with activation_checkpointing(model.model):
            for chosen in plan(lengths, *model.limits):
                batch = examples.collate([requested.examples[i] for i in chosen])
                index = examples.by_row(torch.zeros(len(chosen), dtype=torch.int64))
                weights = None if mix is None else examples.by_row(mix[chosen])
                with bank.attached(index, mix=weights):
                    with model.computing():
                        loss = examples.losses(model.model, batch, all_rows=bank.adapts_head).sum() / count
                    loss.backward()
                total += float(loss.detach())
        return total, State(bank.layout, bank.grads[0].to(requested.state.row.device))

    return model.within_memory(run)


def evidence(model: AdaptedModel, requested: Sequence[GradientMoments]) -> list[Evidence | ClientError]:
    """The moments of the per-example gradients that each asks for; all examples share the backward passes, and no more
    than a chunk's gradients exist at a time. RunError: the device's memory does not suffice for one example."""
    usable = [one for one in requested if model.examples.num_targets(one.examples)]
    moments = iter(model.within_memory(lambda within: _gather(within, usable)) if usable else [])
    return [
        next(moments) if one in usable else ClientError(f"client {one.site}: no example has a target token")
        for one in requested
    ]


def _gather(model: AdaptedModel, jobs: Sequence[GradientMoments]) -> list[Evidence | ClientError]:
    moments: dict[tuple[int, bool], Moments] = {}  # by client and whether the labels are drawn
    losses = torch.zeros(len(jobs), 2, device=model.device)
    units = [(k, example) for k, job in enumerate(jobs) for example in job.examples]
    draws = [
        [generator(job.seed, "labels", n, s) for s in range(2)] if job.sampled else []
        for job in jobs
        for n in range(len(job.examples))
    ]
    states = stack([state for job in jobs for state in (job.first, job.second)]).view(len(jobs), 2, -1)
    for chosen, each, its_losses, sampled in _chunks(model, states, units, draws):
        owners = [units[unit][0] for unit in chosen]
        for k in dict.fromkeys(owners):
            if sampled and not jobs[k].sampled:
                continue
            mine = [index for index, owner in enumerate(owners) if owner == k]
            of_chunk, before = Moments.of(each[mine].transpose(0, 1)), moments.get((k, sampled))
            moments[k, sampled] = of_chunk if before is None else before + of_chunk
            if not sampled:
                losses[k] += its_losses[mine].sum(0)
    found: list[Evidence | ClientError] = []
    for k, job in enumerate(jobs):
        own, fisher = moments[k, False].to("cpu"), moments[k, job.sampled].fisher.cpu()
        first, second = (loss / model.examples.num_targets(job.examples) for loss in losses[k].tolist())
        if own.variance.isfinite().all() and fisher.isfinite().all():
            found.append(Evidence(own, fisher, (first, second)))
        else:
            what = "gradients of its examples are not finite at one of the two adapters to be merged"
            found.append(ClientError(f"client {job.site}: {what}"))
    return found


def _chunks(
    model: AdaptedModel, states: Tensor, units: Sequence[tuple[int, Item]], draws: Sequence[Sequence[torch.Generator]]
) -> Iterator[tuple[list[int], Tensor, Tensor, bool]]:
    """Of the units (k, example) in chunks, at states (K, S, P): the indices (U,) of a chunk, the gradients (U, S, P) of
    log-likelihoods, summed over an example's targets, in memory that the next chunk takes; the losses (U, S); and
    whether labels were drawn. `draws`: per unit S generators; if any, each chunk comes a second time with labels drawn
    from the models."""
    examples, device, (_, size, width) = model.examples, model.device, states.shape
    states = states.to(device)
    lengths = [examples.length(example) for _, example in units]
    most = _most_rows(states) // size
    budget, overhead = model.limits
    planned = plan(lengths, budget // size, overhead)
    chunks = [chosen[at : at + most] for chosen in planned for at in range(0, len(chosen), most)]
    bank = model.bank(size * max(map(len, chunks)), states.dtype)
    for chosen in chunks:
        rows = size * len(chosen)
        bank.rows[:rows].copy_(states[[units[unit][0] for unit in chosen]].view(rows, width))
        batch = on_device(examples.collate([units[unit][1] for unit in chosen for _ in range(size)]), device)
        owner = batch.rows.to(device)
        with bank.attached(examples.by_row(torch.arange(rows))):
            with activation_checkpointing(model.model), model.computing():
                logits = examples.logits(model.model, batch, all_rows=bank.adapts_head)
            generators = [own for unit in chosen for own in draws[unit]] if any(draws) else []
            drawn = [examples.drawn(logits.detach(), batch, generators)] if generators else []
            for number, labelled in enumerate([batch, *drawn]):
                bank.grads.zero_()
                losses = examples.losses_of(logits, labelled)
                with activation_checkpointing(model.model):
                    (-losses.sum()).backward(retain_graph=number < len(drawn))
                summed = torch.zeros(rows, dtype=losses.dtype, device=device).index_add_(0, owner, losses.detach())
                yield chosen, bank.grads[:rows].view(-1, size, width), summed.view(-1, size), number > 0


def _most_rows(states: Tensor) -> int:
    """How many rows of a bank fit into a quarter of the free memory; at least those of one example."""
    return max(states.shape[1], free_memory(states.device) // 4 // (_COPIES * states.shape[2] * states.element_size()))
