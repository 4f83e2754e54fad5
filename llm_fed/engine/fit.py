"""The one local optimisation loop: trains the adapters of a whole cohort, each as if it were alone.

Shape letters: K clients, N rows of a micro-batch, T tokens, n target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from llm_fed.basics import signs
from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import derive
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.deltas import DeltaHook
from llm_fed.engine.examples import Batch, Examples
from llm_fed.engine.laid import on_device
from llm_fed.engine.memory import activation_checkpointing
from llm_fed.engine.packing import padded_tokens, plan
from llm_fed.engine.steps import Steps, together
from llm_fed.method.requests import Fit, Fitted, Work


def fit(model: AdaptedModel, jobs: Sequence[Fit]) -> tuple[list[Fitted | ClientError], Work]:
    """Train all jobs fused: each result is what the client would get alone, up to the rounding of packings.

    A client's loss is the mean over the targets of its batch; optimizer, loss scale (float16) and dropout masks are its
    own. With `Fit.private` it is the mean over the batch's examples of each one's mean over its targets, and batches
    may be empty. Jobs may differ in all else but the structure; one with no batch left rests.

    Args:
        model: its budget is halved until the device's memory suffices; the returned Work says at what, so that the next
            fit can begin there.

    Returns:
        One result per job, a ClientError for a client that failed, and the work done.

    Raises:
        UserError: a pattern or structure that matches nothing.
        RunError: the device's memory does not suffice.
    """
    errors = [_unusable(job, model.examples) for job in jobs]
    usable = [job for job, error in zip(jobs, errors, strict=True) if error is None]
    if not usable:
        return [error for error in errors if error], Work()
    for attempt in model.attempts():
        with attempt as budget:
            results, work = FusedFit(model, usable, budget).run()
    remaining = iter(results)
    return [error or next(remaining) for error in errors], work


@dataclass(frozen=True)
class Laid:
    """A micro-batch of N rows and n targets with all that the device is given for it."""

    batch: Any  # `examples.Batch`
    index: Tensor  # (N,) the row of the bank that each goes through
    owner: Tensor  # (n,) the same of each target
    weights: Tensor  # (n,) what each loss counts
    owners: Sequence[int]  # as index, for the host
    mix: Tensor | None = None  # (N, E)
    masks: Tensor | None = None  # of dropout
    wanted: Tensor | None = None  # (n, C) the teachers' logits
    below: Mapping[str, DeltaHook] = field(default_factory=dict)  # what lies beneath the adapters, by layer


class FusedFit:
    """One fused training run over usable jobs; client k is row k of the bank."""

    def __init__(self, model: AdaptedModel, jobs: Sequence[Fit], budget: int):
        self.model, self.jobs, self.examples, self.device = model, jobs, model.examples, model.device
        self.work = Work(budget=budget)
        self.private = jobs[0].private is not None  # then all are: see `Engine.fit`
        trained = "|".join(f"(?:{pattern})" for pattern in dict.fromkeys(job.train for job in jobs))
        self.bank = model.bank(len(jobs), jobs[0].start.row.dtype, trained)
        for k, job in enumerate(jobs):
            self.bank.load(k, job.start)
        self.scalers: list[torch.amp.GradScaler] = []  # of each client, in float16
        groups = together(jobs)
        if model.autocast == torch.float16:
            self.scalers, groups = (
                [torch.amp.GradScaler(self.device.type) for _ in jobs],
                [[k] for k in range(len(jobs))],
            )
        self.steps = [
            Steps({k: jobs[k] for k in group}, self.bank.rows, self.bank.grads, self.bank.layout) for group in groups
        ]
        self.teachers: AdapterBank | None = None
        if jobs[0].teachers:  # then it is the only job
            self.teachers = model.bank(len(jobs[0].teachers), jobs[0].start.row.dtype)
            for k, state in enumerate(jobs[0].teachers):
                self.teachers.load(k, state)
        self.taught: dict[int, Tensor] = {}  # by place of an example what the teachers answered, for all epochs

    def run(self) -> tuple[list[Fitted | ClientError], Work]:
        last, total = max(len(job.batches) for job in self.jobs), sum(len(job.batches) for job in self.jobs)
        losses = torch.zeros(last, len(self.jobs), device=self.device)
        known: list[list[float]] = []  # the rows of `losses` that were looked at
        failed: dict[int, int] = {}  # the first step at which a client's loss was not finite
        with activation_checkpointing(self.model.model):
            for step in range(last):
                active = [k for k, job in enumerate(self.jobs) if step < len(job.batches) and k not in failed]
                if not active:
                    break
                seen = {k: self.jobs[k].batch(step) for k in active}
                self.step(step, seen, losses[step])
                # Looking at losses makes a GPU wait, so it looks seldom: no client feels another's NaN.
                loss = None
                if self.device.type == "cpu" or step % 10 == 9 or step + 1 == last:
                    for row in losses[len(known) : step + 1].tolist():
                        failed = {k: len(known) for k, value in enumerate(row) if not math.isfinite(value)} | failed
                        known.append(row)
                    loss = fmean([known[step][k] for k in active if k not in failed and seen[k]] or [math.nan])
                signs.step(step + 1, last, len(active), total, loss)
        results = [self._result(k, [row[k] for row in known], failed.get(k)) for k in range(len(self.jobs))]
        return results, self.work

    def step(self, step: int, seen: Mapping[int, Sequence[Any]], losses: Tensor) -> None:
        """One optimizer step of every client that has seen a batch; their mean losses are added to `losses` (K,).

        Nothing here waits for the device, but for the loss scales of float16.
        """
        examples = [(k, n, example) for k in seen for n, example in enumerate(seen[k])]
        lengths = [self.examples.length(example) for _, _, example in examples]
        batches = plan(lengths, self.work.budget, self.model.overhead)
        self.work = replace(
            self.work,
            tokens=self.work.tokens + sum(lengths),
            padded=self.work.padded + padded_tokens(lengths, batches),
            micro_batches=self.work.micro_batches + len(batches),
        )
        weights, scales = self._weights(seen), self._scales()
        self.bank.grads.zero_()
        for chosen in batches:
            rows = [examples[i] for i in chosen]
            laid = self._lay_out(step, rows, [lengths[i] for i in chosen], weights[chosen])
            if (each := self._pass(laid, scales, losses)) is not None:
                for steps in self.steps:
                    steps.add_clipped(each, laid.owners)
        for n, steps in enumerate(self.steps):
            steps.step(seen, self.scalers[n] if self.scalers else None)
        if self.private:
            sizes = [max(1, len(seen.get(k, ()))) for k in range(len(self.jobs))]
            losses /= torch.tensor(sizes).to(self.device)

    def _lay_out(self, step: int, rows: Sequence[Any], lengths: Sequence[int], weights: Tensor) -> Laid:
        """A micro-batch of rows (k, n, example), with one copy from the host to the device."""
        batch, owners = self.examples.collate([example for _, _, example in rows]), [k for k, _, _ in rows]
        index, mixed = torch.tensor(owners), self.bank.structure.gate == "mix"
        mix = torch.tensor([self.jobs[k].mix for k in owners]) if mixed else None
        laid = on_device(Laid(batch, index, index[batch.rows], weights[batch.rows], owners, mix), self.device)
        seeds = [derive(self.jobs[k].seed, step, n) for k, n, _ in rows]
        wanted = self._taught(laid.batch, [self.jobs[k].batches[step][n] for k, n, _ in rows])
        return replace(laid, masks=self.bank.draw_masks(seeds, lengths), wanted=wanted, below=self.bank.beneath(owners))

    def _pass(self, laid: Laid, scales: Tensor | None, losses: Tensor) -> Tensor | None:
        """Forward and backward pass. It reads nothing of the host's memory, so that a graph could hold it.

        Returns:
            (N, P) the gradient of each row, where jobs are private; else the bank has the gradients.
        """
        each = self.bank.rows.new_zeros(len(laid.owners), self.bank.layout.size) if self.private else None
        with self.bank.attached(laid.index, laid.masks, laid.mix, each=each, below=laid.below):
            with self.model.computing():
                loss = self.examples.losses(
                    self.model.model, laid.batch, all_rows=self.bank.adapts_head, wanted=laid.wanted
                )
                loss = loss * laid.weights.to(loss.dtype)
            losses.index_add_(0, laid.owner, loss.detach().to(losses.dtype))
            (loss if scales is None else loss * scales[laid.owner]).sum().backward()
        return each

    def _taught(self, batch: Batch, places: Sequence[int]) -> Tensor | None:
        """The mean of the teachers' logits, (n, C); None without teachers.

        Args:
            places: of the batch's examples among those of the one job.
        """
        if self.teachers is None:
            return None
        if not self.examples.single:
            return self._ask(self.teachers, batch, len(places))
        new = [place for place in places if place not in self.taught]
        if new:
            examples = [self.jobs[0].examples[place] for place in new]
            batch = on_device(self.examples.collate(examples), self.device)
            self.taught |= zip(new, self._ask(self.teachers, batch, len(new)), strict=True)
        return torch.stack([self.taught[place] for place in places])

    @torch.no_grad()
    def _ask(self, teachers: AdapterBank, batch: Batch, rows: int) -> Tensor:
        total = torch.zeros(())
        for k in range(len(teachers.rows)):
            with teachers.attached(torch.full((rows,), k)), self.model.computing():
                total = total + self.examples.logits(self.model.model, batch, all_rows=teachers.adapts_head)
        return total / len(teachers.rows)

    def _weights(self, seen: Mapping[int, Sequence[Any]]) -> Tensor:
        """By example of the step, on the CPU: one over the number of targets in its batch; private: of its own."""
        counts: list[int] = []
        for examples in seen.values():
            if self.private:
                counts += [self.examples.num_targets([example]) for example in examples]
            else:
                counts += [self.examples.num_targets(examples)] * len(examples)
        exact = torch.promote_types(self.bank.rows.dtype, torch.float32)
        return torch.tensor(counts, dtype=torch.float64).reciprocal().to(exact)

    def _scales(self) -> Tensor | None:
        """(K,): the scale of each client's loss, in float16."""
        one = torch.ones((), device=self.device)
        return torch.stack([scaler.scale(one) for scaler in self.scalers]) if self.scalers else None

    def _result(self, k: int, losses: list[float], failed: int | None) -> Fitted | ClientError:
        job = self.jobs[k]
        hint = f"(lr {job.optimizer.lr:g}); lower local.lr or set local.clip"
        if failed is not None:
            return ClientError(f"client {job.site}: loss is {losses[failed]} at local step {failed + 1} {hint}")
        state = job.start.like(self.bank.read(k).row.to(job.start.row.device))
        if not state.is_finite():
            return ClientError(f"client {job.site}: weights not finite after {len(job.batches)} local steps {hint}")
        (steps,) = (steps for steps in self.steps if k in steps.parameters)
        moments = {} if job.moments is None else steps.moments(k)
        return Fitted(state, tuple(loss for loss, batch in zip(losses, job.batches, strict=False) if batch), moments)


def _unusable(job: Fit, examples: Examples) -> ClientError | None:
    """Why the job cannot be trained, if so. A private one must not tell what its batches hold: none is refused."""
    for step, places in enumerate(job.batches if job.private is None else ()):
        if not examples.num_targets([job.examples[place] for place in places]):
            return ClientError(
                f"client {job.site}: its batch of local step {step + 1} has no target token; "
                "give it examples with a response"
            )
    return None
