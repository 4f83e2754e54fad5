"""The one local optimisation loop: trains the adapters of a whole cohort, each as if it were alone.

Shape letters: K clients, N rows of a micro-batch, T tokens, n target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics import signs
from llm_fed.basics.errors import ClientError, UserError
from llm_fed.basics.rng import derive
from llm_fed.engine.adapted import AdaptedModel
from llm_fed.engine.bank import AdapterBank
from llm_fed.engine.capture import Stage, refusal
from llm_fed.engine.end_to_end import flattened
from llm_fed.engine.examples import Batch, Examples
from llm_fed.engine.inference import log_likelihoods
from llm_fed.engine.laid import Laid, on_device
from llm_fed.engine.memory import activation_checkpointing
from llm_fed.engine.packing import filled, padded_tokens, plan
from llm_fed.engine.passes import one_pass
from llm_fed.engine.steps import Steps, together
from llm_fed.engine.tokens import groups_of
from llm_fed.method.requests import Fit, Fitted, Work

PLACE = "example"  # the column that each fit has: the place of a target's example among those of the fit


def names_of(jobs: Sequence[Fit]) -> tuple[str, ...]:
    """The columns that the functions of these fits are given; empty where none has a function.

    Raises:
        UserError: examples differ in their further columns.
    """
    if not any(callable(job.loss) for job in jobs):
        return ()
    found = {tuple(getattr(example, "extra", {})) for job in jobs for example in job.examples}
    if len(found) > 1:
        several = " and ".join(sorted(", ".join(names) or "none" for names in found))
        raise UserError(
            f"examples that train together have different further columns ({several}), so no loss can read them; give "
            "every file the columns of task.columns.extra"
        )
    return (PLACE, *next(iter(found), ()))


def columns_of(examples: Sequence[Any], places: Sequence[int]) -> Tensor:
    """(examples, numbers) float64, in the order of `names_of`."""
    rows = [
        [float(place), *map(float, getattr(example, "extra", {}).values())]
        for place, example in zip(places, examples, strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64)


def own_losses(jobs: Sequence[Fit], names: Sequence[str], logits: Tensor, laid: Any) -> Tensor:
    """The losses (targets of all clients,): each client's function is given its own targets alone.

    Args:
        logits: (targets, C).
        laid: the micro-batch (`fit.Laid`), on the device of the logits.

    Raises:
        UserError: a function returned something else than a number for each target.
    """
    labels, losses = laid.batch.labels.to(logits.device), logits.new_zeros(len(logits))
    by_target = laid.columns[laid.batch.rows.to(laid.columns.device)].to(logits)
    for k in dict.fromkeys(laid.owners):
        own, loss = (laid.owner == k).nonzero().flatten().to(logits.device), jobs[k].loss
        mine, targets = logits[own], labels[own]
        if not callable(loss):
            losses = losses.index_put((own,), nn.functional.cross_entropy(mine, targets, reduction="none"))
            continue
        columns = dict(zip(names, by_target[own].unbind(1), strict=True))
        columns[PLACE] = columns[PLACE].long()
        found = loss(mine, targets, columns)
        if not isinstance(found, Tensor) or found.shape != targets.shape:
            what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise UserError(
                f"client {jobs[k].site}: loss=FUNCTION returned {what} for {len(targets)} targets; it takes logits "
                "(n, C), targets (n,) and columns, and returns a loss (n,) for each target"
            )
        losses = losses.index_put((own,), found)
    return losses


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


class FusedFit:
    """One fused training run over usable jobs; client k is row k of the bank."""

    def __init__(self, model: AdaptedModel, jobs: Sequence[Fit], budget: int):
        self.model, self.jobs, self.examples, self.device = model, jobs, model.examples, model.device
        asked = {"captured": model.captures, "padding_free": model.padding_free}
        self.work = Work(budget=budget, asked=tuple(name for name, on in asked.items() if on is not None))
        self.private = jobs[0].private is not None  # then all are: see `Engine.fit`
        self.in_rows = model.padding_free.in_rows(model, jobs) if model.padding_free else "padding is allowed"
        trained = "|".join(f"(?:{pattern})" for pattern in dict.fromkeys(job.train for job in jobs))
        self.stage = model.captures and model.captures.stage(model, jobs, trained)
        if self.stage:
            lengths = (self.examples.length(job.examples[place]) for job in jobs for b in job.batches for place in b)
            self.stage.longest = max(lengths, default=0)
        self.bank = self.stage.bank if self.stage else model.bank(len(jobs), jobs[0].start.row.dtype, trained)
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
        self.names = names_of(jobs)  # of the columns that losses of their own are given; empty: none has one

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
        trained = self._trained()
        results = [self._result(k, trained[k], [row[k] for row in known], failed.get(k)) for k in range(len(self.jobs))]
        whys = []
        if self.model.captures:
            whys.append(self.stage.why if self.stage else refusal(self.model, self.jobs))
        if self.model.padding_free:
            whys.append(self.in_rows)
        self.work = replace(self.work, why="; ".join(dict.fromkeys(filter(None, whys))))
        return results, self.work

    def step(self, step: int, seen: Mapping[int, Sequence[Any]], losses: Tensor) -> None:
        """One optimizer step of every client that has seen a batch; their mean losses are added to `losses` (K,).

        Nothing here waits for the device, but for the loss scales of float16.
        """
        examples = [(k, n, example) for k in seen for n, example in enumerate(seen[k])]
        lengths = [self.examples.length(example) for _, _, example in examples]
        batches, padded = self._divided(lengths)
        self.work = replace(
            self.work,
            tokens=self.work.tokens + sum(sum(self.examples.sizes(example)) for _, _, example in examples),
            padded=self.work.padded + padded,
            micro_batches=self.work.micro_batches + len(batches),
            padding_free=self.work.padding_free + (0 if self.in_rows else len(batches)),
        )
        weights, scales, drifts = self._weights(seen), self._scales(), self._drifts(seen)
        self.bank.grads.zero_()
        by_batch = [([examples[i] for i in chosen], weights[chosen]) for chosen in batches]
        if self.stage:
            self._replay(self.stage, step, by_batch, scales, losses)
        else:
            for rows, of_rows in by_batch:
                laid = self._lay_out(step, rows, of_rows, drifts)
                if (each := self._pass(laid, scales, losses)) is not None:
                    for steps in self.steps:
                        steps.add_clipped(each, laid.owners)
        for n, steps in enumerate(self.steps):
            steps.step(seen, self.scalers[n] if self.scalers else None)
        if self.private:
            sizes = [max(1, len(seen.get(k, ()))) for k in range(len(self.jobs))]
            losses /= torch.tensor(sizes).to(self.device)

    def _divided(self, lengths: Sequence[int]) -> tuple[list[list[int]], int]:
        """The micro-batches of examples of these lengths, and their tokens with padding."""
        grid = self.stage.grid if self.stage else None
        if not self.in_rows:
            batches = filled(lengths, self.work.budget)
            sums = [sum(lengths[i] for i in batch) for batch in batches]
            return batches, sum(map(grid.end_to_end, sums) if grid else sums)
        batches = plan(lengths, self.work.budget, self.model.overhead, grid)
        return batches, padded_tokens(lengths, batches, grid)

    def _replay(self, stage: Stage, step: int, by_batch: Sequence[Any], scales: Tensor | None, losses: Tensor) -> None:
        """The passes of a step over the stage's static memory."""
        stage.begin(scales)
        for rows, weights in by_batch:
            replayed = stage.take(self._on_host(step, rows, weights, {}), *self._dropout(step, rows))
            self.work = replace(self.work, replayed=self.work.replayed + replayed)
        losses.add_(stage.losses[: len(losses)])

    def _lay_out(self, step: int, rows: Sequence[Any], weights: Tensor, drifts: Mapping[int, float]) -> Laid:
        """A micro-batch of examples (k, n, example), with one copy from the host to the device."""
        laid = on_device(self._on_host(step, rows, weights, drifts), self.device)
        wanted = self._taught(laid.batch, [self.jobs[k].batches[step][n] for k, n, _ in rows])
        below = self.bank.beneath([k for k, _, _ in rows for _ in range(self.examples.each)])
        masks = self.bank.draw_masks(*self._dropout(step, rows), end_to_end=not self.in_rows)
        return replace(laid, wanted=wanted, below=below, masks=masks)

    def _end_to_end(self, step: int, rows: Sequence[Any], weights: Tensor) -> Laid:
        """A micro-batch without padding, on the host. Its examples are in the order of clients."""
        batch, owners = flattened([example for _, _, example in rows]), [k for k, _, _ in rows]
        clients, groups = groups_of(owners, [len(example.input_ids) for _, _, example in rows])
        owner, index = torch.tensor(owners), torch.tensor(clients)
        mixed = self.bank.structure.gate == "mix"
        return Laid(
            batch, index, owner[batch.rows], weights[batch.rows], torch.arange(len(clients)), owners,
            mix=torch.tensor([self.jobs[k].mix for k in clients])[groups.of] if mixed else None,
            columns=self._columns(step, rows), groups=groups,
        )  # fmt: skip

    def _columns(self, step: int, rows: Sequence[Any]) -> Tensor | None:
        places = [self.jobs[k].batches[step][n] for k, n, _ in rows]
        return columns_of([example for _, _, example in rows], places) if self.names else None

    def _on_host(self, step: int, rows: Sequence[Any], weights: Tensor, drifts: Mapping[int, float]) -> Laid:
        if self.in_rows:
            return self._side_by_side(step, rows, weights, drifts)
        return self._end_to_end(step, rows, weights)

    def _side_by_side(self, step: int, rows: Sequence[Any], weights: Tensor, drifts: Mapping[int, float]) -> Laid:
        of, owners = self.examples, [k for k, _, _ in rows]
        batch, owner = of.collate([example for _, _, example in rows]), torch.tensor(owners)
        if drifts:
            batch = replace(batch, drift=torch.tensor([drifts[k] for k in owners], dtype=torch.float64))
        mixed = self.bank.structure.gate == "mix"
        mix = of.by_row(torch.tensor([self.jobs[k].mix for k in owners])) if mixed else None
        into = of.by_row(torch.arange(len(rows)))
        return Laid(
            batch, of.by_row(owner), owner[batch.rows], weights[batch.rows], into, owners, mix,
            self._columns(step, rows),
        )  # fmt: skip

    def _dropout(self, step: int, rows: Sequence[Any]) -> tuple[list[int], list[int]]:
        """The seeds of the rows' masks, and their lengths."""
        each = range(self.examples.each)
        seeds = [derive(self.jobs[k].seed, step, n, *([m] if m else [])) for k, n, _ in rows for m in each]
        return seeds, [size for _, _, example in rows for size in self.examples.sizes(example)]

    def _pass(self, laid: Laid, scales: Tensor | None, losses: Tensor) -> Tensor | None:
        """Forward and backward pass.

        Returns:
            (examples, P) the gradient of each example, where jobs are private; else the bank has the gradients.
        """
        each = self.bank.rows.new_zeros(len(laid.owners), self.bank.layout.size) if self.private else None
        own = partial(own_losses, self.jobs, self.names, laid=laid) if self.names else None
        one_pass(self.model, self.bank, laid, scales, losses, each, own)
        return each

    def _drifts(self, seen: Mapping[int, Sequence[Any]]) -> dict[int, float]:
        """By client z of KTO: how far its model is from the reference, by the batch's answers to other prompts."""
        if not self.examples.drifts:
            return {}
        asked = [(k, example) for k in seen for example in seen[k]]
        mixed = self.bank.structure.gate == "mix"
        logps = log_likelihoods(
            replace(self.model, budget=self.work.budget), self.bank, [example.other for _, example in asked],
            mix=torch.tensor([self.jobs[k].mix for k, _ in asked]) if mixed else None, rows=[k for k, _ in asked],
        )  # fmt: skip
        far: dict[int, list[float]] = {k: [] for k in seen}
        for (k, example), logp in zip(asked, logps, strict=True):
            far[k].append(logp - example.reference[1])
        return {k: max(0.0, fmean(values)) if values else 0.0 for k, values in far.items()}

    def _taught(self, batch: Batch, places: Sequence[int]) -> Tensor | None:
        """The mean of the teachers' logits, (targets, C); None without teachers.

        Args:
            places: of the batch's examples among those of the one job.
        """
        if self.teachers is None:
            return None
        if not self.examples.single:
            return self._ask(self.teachers, batch, len(places) * self.examples.each)
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

    def _trained(self) -> list[Tensor]:
        """The bank's rows, each where its job keeps its state. A GPU copies all of them, and is waited for once."""
        gpu = self.device.type == "cuda"
        rows = [
            self.bank.read(k).row.to(job.start.row.device, non_blocking=gpu) for k, job in enumerate(self.jobs)
        ]  # fmt: skip
        if gpu:
            torch.cuda.synchronize(self.device)
        return rows

    def _result(self, k: int, row: Tensor, losses: list[float], failed: int | None) -> Fitted | ClientError:
        job = self.jobs[k]
        hint = f"(lr {job.optimizer.lr:g}); lower local.lr or set local.clip"
        if failed is not None:
            return ClientError(f"client {job.site}: loss is {losses[failed]} at local step {failed + 1} {hint}")
        state = job.start.like(row)
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
