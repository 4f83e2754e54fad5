"""The one local optimisation loop: trains the adapters of a whole cohort, each as if it were alone.

Shape letters: K clients, N rows of a micro-batch, T tokens, n target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed import signs
from llm_fed.config import LocalConfig
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.examples import TEXT, Batch, Kind
from llm_fed.engine.memory import activation_checkpointing, budget_and_overhead, within_memory
from llm_fed.engine.packing import padded_tokens, plan
from llm_fed.errors import ClientError, require
from llm_fed.losses import divergence
from llm_fed.models.frozen import device_of
from llm_fed.models.lora import Lora
from llm_fed.requests import Fitted, Job, Work
from llm_fed.rng import derive

# Fused: one pass over the numbers of a row (docs/performance.md); torch takes it only when asked.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, weight_decay=0.0, fused=True),
    "adam": partial(torch.optim.Adam, fused=True),
    "sgd": torch.optim.SGD,
}


def fit(
    model: nn.Module,
    structure: Lora,
    jobs: Sequence[Job],
    local: LocalConfig,
    *,
    kind: Kind = TEXT,
    autocast: torch.dtype | None = None,
    budget: int | None = None,
) -> tuple[list[Fitted | ClientError], Work]:
    """Train all jobs fused: each result is what the client would get alone, up to the rounding of packings.

    A client's loss is the mean over the targets of its batch; steps, clipping, loss scale (float16)
    and dropout masks are its own. Jobs may differ in all but the structure; one with no batch left rests.

    Args:
        model: a causal language model, or an image classifier; it is frozen and its own dropout is off.
        local: `optimizer`, `clip`, `proximal` and `augment` are used; steps and learning rates stand in the jobs.
        kind: of the examples.
        autocast: compute in this dtype; the adapters keep theirs.
        budget: most tokens of a micro-batch (default: by device). Halved until the device's memory suffices;
            the returned Work says at what, so that the next fit can begin there.

    Returns:
        One result per job, a ClientError for a client that failed, and the work done.

    Raises:
        UserError: unknown optimizer, or a pattern or structure that matches nothing.
        RunError: the device's memory does not suffice.
    """
    require("local.optimizer", local.optimizer, OPTIMIZERS)
    errors = [_unusable(job, kind) for job in jobs]
    usable = [job for job, error in zip(jobs, errors, strict=True) if error is None]
    if not usable:
        return [error for error in errors if error], Work()
    default, overhead = budget_and_overhead(device_of(model))
    results, work = within_memory(
        lambda budget: _Fit(model, structure, usable, local, kind, autocast, budget, overhead).run(),
        budget or default,
    )
    remaining = iter(results)
    return [error or next(remaining) for error in errors], work


def token_losses(
    model: nn.Module, batch: Batch, *, kind: Kind = TEXT, all_rows: bool = False, wanted: Tensor | None = None
) -> Tensor:
    """Negative log-likelihood of each target, (n,), in the dtype of `Kind.logits`. With `wanted` logits (n, C): the
    divergence of the predictions from theirs."""
    logits = kind.logits(model, batch, all_rows=all_rows)
    if wanted is not None:
        return divergence(logits, wanted)
    return nn.functional.cross_entropy(logits, batch.labels.to(logits.device), reduction="none")


class _Fit:
    """One fused training run over usable jobs; client k is row k of the bank."""

    def __init__(
        self,
        model: nn.Module,
        structure: Lora,
        jobs: Sequence[Job],
        local: LocalConfig,
        kind: Kind,
        autocast: torch.dtype | None,
        budget: int,
        overhead: int,
    ):
        self.model, self.jobs, self.local, self.kind, self.autocast = model, jobs, local, kind, autocast
        self.device = device_of(model)
        self.work, self.overhead = Work(budget=budget), overhead
        trained = "|".join(f"(?:{pattern})" for pattern in dict.fromkeys(job.train for job in jobs))
        self.bank = AdapterBank(model, structure, len(jobs), jobs[0].start.row.dtype, trained)
        self.adapted_head = self.bank.adapts_head
        self.segments = [self.bank.layout.segments(job.train) for job in jobs]
        self.optimizers, self.scalers = [], []
        for k, job in enumerate(jobs):
            self.bank.load(k, job.start)
            parameters = [nn.Parameter(self.bank.rows[k, segment]) for segment in self.segments[k]]
            for parameter, segment in zip(parameters, self.segments[k], strict=True):
                parameter.grad = self.bank.grads[k, segment]
            self.optimizers.append(OPTIMIZERS[local.optimizer](parameters, lr=job.lr))
            self.scalers.append(torch.amp.GradScaler(self.device.type, enabled=autocast == torch.float16))
        self.start = self.bank.rows.clone() if local.proximal else None
        self.teachers: AdapterBank | None = None
        if jobs[0].teachers:  # then it is the only job
            self.teachers = AdapterBank(model, structure, len(jobs[0].teachers), jobs[0].start.row.dtype)
            for k, state in enumerate(jobs[0].teachers):
                self.teachers.load(k, state)
        self.taught: dict[int, Tensor] = {}  # by id of an example what the teachers answered, for all epochs

    def run(self) -> tuple[list[Fitted | ClientError], Work]:
        last, total = max(len(job.batches) for job in self.jobs), sum(len(job.batches) for job in self.jobs)
        losses = torch.zeros(last, len(self.jobs), device=self.device)
        failed: dict[int, int] = {}  # the step at which a client's loss was not finite
        with activation_checkpointing(self.model):
            for step in range(last):
                active = [k for k, job in enumerate(self.jobs) if step < len(job.batches) and k not in failed]
                if not active:
                    break
                self._step(step, active, losses[step])
                # Looking at losses makes a GPU wait, so it looks seldom: no client feels another's NaN.
                loss = None
                if self.device.type == "cpu" or step % 10 == 9 or step + 1 == last:
                    failed = self._failures(losses, step)
                    found = losses[step].tolist()
                    loss = fmean([found[k] for k in active if k not in failed] or [math.nan])
                signs.step(step + 1, last, len(active), total, loss)
        return [self._result(k, losses[:, k].tolist(), failed.get(k)) for k in range(len(self.jobs))], self.work

    def _step(self, step: int, active: list[int], losses: Tensor) -> None:
        """One optimizer step of every active client; their mean losses are added to `losses` (K,)."""
        seen = {k: self.jobs[k].examples(step, self.local.augment) for k in active}
        examples = [(k, n, example) for k in active for n, example in enumerate(seen[k])]
        lengths = [self.kind.length(example) for _, _, example in examples]
        batches = plan(lengths, self.work.budget, self.overhead)
        self.work = replace(
            self.work,
            tokens=self.work.tokens + sum(lengths),
            padded=self.work.padded + padded_tokens(lengths, batches),
            micro_batches=self.work.micro_batches + len(batches),
        )
        weights, scales = self._weights(step, active)
        self.bank.grads.zero_()
        for chosen in batches:
            rows = [examples[i] for i in chosen]
            batch = self.kind.collate([example for _, _, example in rows])
            index = torch.tensor([k for k, _, _ in rows])
            seeds = [derive(self.jobs[k].seed, step, n) for k, n, _ in rows]
            masks = self.bank.draw_masks(seeds, [lengths[i] for i in chosen])
            owner = index[batch.rows].to(self.device)
            mix = torch.tensor([self.jobs[k].mix for k, _, _ in rows]) if self.bank.structure.gate == "mix" else None
            wanted = self._taught(batch, [example for _, _, example in rows])
            with self.bank.attached(index, masks, mix):
                with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
                    loss = token_losses(self.model, batch, kind=self.kind, all_rows=self.adapted_head, wanted=wanted)
                    loss = loss * weights[owner].to(loss.dtype)
                losses.index_add_(0, owner, loss.detach().to(losses.dtype))
                (loss * scales[owner]).sum().backward()
        for k in active:
            self._update(k)

    def _taught(self, batch: Batch, examples: Sequence[Any]) -> Tensor | None:
        """The mean of the teachers' logits, (n, C); None without teachers."""
        if self.teachers is None:
            return None
        if not self.kind.single:
            return self._ask(self.teachers, batch, len(examples))
        new = [example for example in examples if id(example) not in self.taught]
        if new:
            answers = self._ask(self.teachers, self.kind.collate(new), len(new))
            self.taught |= {id(example): answer for example, answer in zip(new, answers, strict=True)}
        return torch.stack([self.taught[id(example)] for example in examples])

    @torch.no_grad()
    def _ask(self, teachers: AdapterBank, batch: Batch, rows: int) -> Tensor:
        total = torch.zeros(())
        autocast = torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)
        for k in range(len(teachers.rows)):
            with teachers.attached(torch.full((rows,), k)), autocast:
                total = total + self.kind.logits(self.model, batch, all_rows=self.adapted_head)
        return total / len(teachers.rows)

    def _weights(self, step: int, active: list[int]) -> tuple[Tensor, Tensor]:
        """Per client (K,): one over the number of its targets, and the scale of its loss (float16)."""
        counts = torch.ones(len(self.jobs), dtype=torch.float64)
        for k in active:
            counts[k] = self.kind.num_targets(self.jobs[k].batches[step])
        one = torch.ones((), device=self.device)
        exact = torch.promote_types(self.bank.rows.dtype, torch.float32)
        return counts.reciprocal().to(self.device, exact), torch.stack([scaler.scale(one) for scaler in self.scalers])

    def _update(self, k: int) -> None:
        """Client k's optimizer step."""
        optimizer, scaler = self.optimizers[k], self.scalers[k]
        scaler.unscale_(optimizer)
        if self.start is not None:
            for segment in self.segments[k]:
                drift = self.bank.rows[k, segment] - self.start[k, segment]
                self.bank.grads[k, segment].add_(drift, alpha=2 * self.local.proximal)
        if self.local.clip is not None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], self.local.clip)
        scaler.step(optimizer)
        scaler.update()

    def _failures(self, losses: Tensor, step: int) -> dict[int, int]:
        """By client the first step up to `step` at which its loss was not finite."""
        finite = torch.isfinite(losses[: step + 1]).cpu()
        failures = {}
        for k, job in enumerate(self.jobs):
            bad = (~finite[: len(job.batches), k]).nonzero()
            if len(bad):
                failures[k] = int(bad[0])
        return failures

    def _result(self, k: int, losses: list[float], failed: int | None) -> Fitted | ClientError:
        job = self.jobs[k]
        hint = f"(lr {job.lr:g}); lower local.lr or set local.clip"
        if failed is not None:
            return ClientError(f"client {job.client}: loss is {losses[failed]} at local step {failed + 1} {hint}")
        state = job.start.like(self.bank.read(k).row.to(job.start.row.device))
        if not state.is_finite():
            return ClientError(f"client {job.client}: not finite after {len(job.batches)} local steps {hint}")
        return Fitted(state, tuple(losses[: len(job.batches)]))


def _unusable(job: Job, kind: Kind) -> ClientError | None:
    """Why the job cannot be trained, if so."""
    for step, batch in enumerate(job.batches):
        if not kind.num_targets(batch):
            return ClientError(
                f"client {job.client}: no token counts in the loss at local step {step + 1}; "
                "give it examples with a response"
            )
    return None
