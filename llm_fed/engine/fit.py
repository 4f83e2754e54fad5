"""The one local optimisation loop: trains the adapters of a whole cohort, each as if it were alone.

Shape letters: K clients, N rows of a micro-batch, T tokens, n target tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn

from llm_fed.basics import signs
from llm_fed.basics.errors import ClientError, UserError
from llm_fed.basics.rng import derive
from llm_fed.engine.bank import AdaptedModel, AdapterBank
from llm_fed.engine.examples import Batch, Examples, Item
from llm_fed.engine.inference import log_likelihoods
from llm_fed.engine.memory import activation_checkpointing, on_device
from llm_fed.engine.packing import divided
from llm_fed.engine.passes import PassInputs, inputs_of, one_pass, refusal
from llm_fed.engine.steps import Steps, fitted, together
from llm_fed.method.requests import Fit, Fitted, Work
from llm_fed.tasks.common import Encoded, Judged

Seen = Mapping[int, Sequence[Item]]  # by client the examples of a step
Rows = Sequence[tuple[int, int, Item]]  # of a micro-batch: client, place in its batch, example
PLACE = "example"  # the column that each fit has: the place of a target's example among those of the fit


def names_of(jobs: Sequence[Fit]) -> tuple[str, ...]:
    """The columns that the functions of these fits are given. UserError: examples differ in their further columns."""
    found = {tuple(_extra(example)) for job in jobs for example in job.examples}
    if len(found) > 1:
        several = " and ".join(sorted(", ".join(names) or "none" for names in found))
        raise UserError(
            f"examples that train together have different further columns ({several}), so no loss can read them; give "
            "every file the columns of task.columns.extra"
        )
    return (PLACE, *next(iter(found), ()))


def columns_of(names: Sequence[str], examples: Sequence[Item], indices: Sequence[int]) -> dict[str, Tensor]:
    """The columns of `names_of` (examples,), in float64."""
    rows = [(index, *_extra(example).values()) for index, example in zip(indices, examples, strict=True)]
    return dict(zip(names, torch.tensor(rows, dtype=torch.float64).unbind(1), strict=True))


def _extra(example: Item) -> dict[str, float]:
    return example.extra if isinstance(example, Encoded) else {}


def own_losses(jobs: Sequence[Fit], columns: Mapping[str, Tensor], inputs: PassInputs, logits: Tensor) -> Tensor:
    """The losses (targets of all clients,): each client's function is given its own targets alone. UserError: a
    function returned something else than a number for each target.

    Args:
        columns: (examples,) of each name.
        inputs: the micro-batch, on the device of the logits.
        logits: (targets, C).
    """
    labels, losses = inputs.batch.labels.to(logits.device), logits.new_zeros(len(logits))
    by_target = {name: column.to(logits)[inputs.batch.rows] for name, column in columns.items()}
    for k in dict.fromkeys(inputs.owners):
        own, loss = (inputs.owner == k).nonzero().flatten().to(logits.device), jobs[k].loss
        mine, targets = logits[own], labels[own]
        if not callable(loss):
            losses = losses.index_put((own,), nn.functional.cross_entropy(mine, targets, reduction="none"))
            continue
        of_targets = {name: column[own] for name, column in by_target.items()}
        found = loss(mine, targets, of_targets | {PLACE: of_targets[PLACE].long()})
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

    A client's loss is the mean over the targets of its batch; optimizer and dropout masks are its own. With
    `Fit.private` it is the mean over the batch's examples of each one's mean over its targets, and batches may be
    empty. Jobs may differ in all else but the structure; one with no batch left rests. `model`: its budget is halved
    until the device's memory suffices; the returned Work says at what, so that the next fit can begin there.

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
    results, work = model.within_memory(lambda within: FusedFit(within, usable).run())
    remaining = iter(results)
    return [error or next(remaining) for error in errors], work


class FusedFit:
    """One fused training run over usable jobs; client k is row k of the bank."""

    def __init__(self, model: AdaptedModel, jobs: Sequence[Fit]):
        self.model, self.jobs, self.examples, self.device = model, jobs, model.examples, model.device
        requested = {"captured": model.captures is not None, "padding_free": model.padding_free}
        self.work = Work(budget=model.limits[0], requested=tuple(name for name, on in requested.items() if on))
        self.private = jobs[0].private is not None  # then all are: see `Engine.fit`
        self.mixed = model.structure.gate == "mix"
        self.why = refusal(model, jobs) if self.work.requested else ""
        self.flat = model.padding_free and not self.why
        trained = "|".join(f"(?:{pattern})" for pattern in dict.fromkeys(job.train for job in jobs))
        self.captured = None  # static memory, in whose bank the jobs train
        if model.captures and self.why:
            model.captures.say(f"training passes are not captured: {self.why}")
        elif model.captures:
            self.captured = model.captures.passes(model, jobs, trained)
        self.bank = self.captured.bank if self.captured else model.bank(len(jobs), jobs[0].start.row.dtype, trained)
        for k, job in enumerate(jobs):
            self.bank.load(k, job.start)
        self.steps = [
            Steps({k: jobs[k] for k in group}, self.bank.rows, self.bank.grads, self.bank.layout)
            for group in together(jobs)
        ]
        self.teachers = model.bank_of(jobs[0].teachers) if jobs[0].teachers else None  # then it is the only job
        self.taught: dict[int, Tensor] = {}  # by index of an example what the teachers answered, for all epochs
        self.own = any(callable(job.loss) for job in jobs)
        self.names = names_of(jobs) if self.own else ()  # of the columns that losses of their own are given

    def run(self) -> tuple[list[Fitted | ClientError], Work]:
        last = max(len(job.batches) for job in self.jobs)
        losses = torch.zeros(last, len(self.jobs), device=self.device)
        known: list[list[float]] = []  # the rows of `losses` that were looked at
        failed: set[int] = set()  # the clients whose loss was not finite
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
                        failed |= {k for k, value in enumerate(row) if not math.isfinite(value)}
                        known.append(row)
                    loss = fmean([known[step][k] for k in active if k not in failed and seen[k]] or [math.nan])
                signs.listener.get().step(step + 1, last, loss)
        results = []
        for k, job in enumerate(self.jobs):
            state = job.start.like(self.bank.rows[k].to(job.start.row.device, copy=True))
            results.append(fitted(job, state, [row[k] for row in known]))
        return results, replace(self.work, why=self.why or (self.captured.recorder.why if self.captured else ""))

    def step(self, step: int, seen: Seen[Item], losses: Tensor) -> None:
        """One step of every client that has seen a batch; their mean losses are added to `losses` (K,), unawaited."""
        examples = [(k, n, example) for k in seen for n, example in enumerate(seen[k])]
        lengths = [self.examples.length(example) for _, _, example in examples]
        captured, limits = self.captured, self.model.limits
        batches, padded = divided(lengths, *limits, captured.grid if captured else None, flat=self.flat)
        self.work = replace(
            self.work,
            tokens=self.work.tokens + sum(sum(self.examples.sizes(example)) for _, _, example in examples),
            padded=self.work.padded + padded,
            micro_batches=self.work.micro_batches + len(batches),
            padding_free=self.work.padding_free + self.flat * len(batches),
        )
        weights, drifts = self._weights(seen), self._drifts(seen) if self.examples.drifts else {}
        self.bank.grads.zero_()
        if captured:
            captured.losses.zero_()
        for chosen in batches:
            self._take(step, [examples[i] for i in chosen], weights[chosen], drifts, losses)
        if captured:
            losses += captured.losses[: len(losses)]
        for steps in self.steps:
            steps.step(seen)
        if self.private:
            sizes = [max(1, len(seen.get(k, ()))) for k in range(len(self.jobs))]
            losses /= torch.tensor(sizes).to(self.device)

    def _take(self, step: int, rows: Rows[Item], weights: Tensor, drifts: Mapping[int, float], losses: Tensor) -> None:
        """The pass over a micro-batch."""
        owners, examples = [k for k, _, _ in rows], [example for _, _, example in rows]
        drift = torch.tensor([drifts[k] for k in owners], dtype=torch.float64) if drifts else None
        mix = self._mix(owners) if self.mixed else None
        inputs = inputs_of(self.examples, examples, owners, weights, mix, drift, flat=self.flat)
        seeds: list[int] = []
        sizes: list[int] = []
        for k, n, example in rows if self.bank.drops else ():
            seeds += [derive(self.jobs[k].seed, step, n, *([m] if m else [])) for m in range(self.examples.each)]
            sizes += self.examples.sizes(example)
        if self.captured:
            replayed = self.captured.take(inputs, seeds, sizes)
            self.work = replace(self.work, replayed=self.work.replayed + replayed)
            return
        inputs = on_device(inputs, self.device)
        masks = self.bank.draw_masks(seeds, sizes, end_to_end=self.flat) if seeds else None
        of_rows = self.examples.by_row(torch.tensor(owners)).tolist()
        indices = [self.jobs[k].batches[step][n] for k, n, _ in rows]
        wanted = self._taught(self.teachers, indices, inputs.batch) if self.teachers else None
        inputs = replace(inputs, masks=masks, below=self.bank.beneath(of_rows), wanted=wanted)
        own = partial(own_losses, self.jobs, columns_of(self.names, examples, indices)) if self.own else None
        each = self.bank.rows.new_zeros(len(rows), self.bank.layout.size) if self.private else None
        one_pass(self.model, self.bank, inputs, losses, each, own)
        if each is not None:
            for steps in self.steps:
                steps.add_clipped(each, owners)

    def _drifts(self, seen: Seen[Judged]) -> dict[int, float]:
        """By client z of KTO: how far its model is from the reference, by the batch's answers to other prompts."""
        requested = [(k, example) for k in seen for example in seen[k]]
        owners, others = [k for k, _ in requested], [example.other for _, example in requested]
        logps = log_likelihoods(
            self.model, self.bank, others, mix=self._mix(owners) if self.mixed else None, rows=owners
        )
        far: dict[int, list[float]] = {k: [] for k in seen}
        for (k, example), logp in zip(requested, logps, strict=True):
            far[k].append(logp - example.reference[1])
        return {k: max(0.0, fmean(values)) if values else 0.0 for k, values in far.items()}

    def _mix(self, owners: Sequence[int]) -> Tensor:
        """(examples, E): the weights of experts of each client's example."""
        return torch.tensor([self.jobs[k].mix for k in owners])

    def _taught(self, teachers: AdapterBank, indices: Sequence[int], batch: Batch) -> Tensor:
        """The mean of the teachers' logits, (targets, C). `indices`: of its examples in the one job."""
        if not self.examples.single:
            return self._ask(teachers, batch, len(indices) * self.examples.each)
        new = [index for index in indices if index not in self.taught]
        if new:
            examples = [self.jobs[0].examples[index] for index in new]
            batch = on_device(self.examples.collate(examples), self.device)
            self.taught |= zip(new, self._ask(teachers, batch, len(new)), strict=True)
        return torch.stack([self.taught[index] for index in indices])

    @torch.no_grad()
    def _ask(self, teachers: AdapterBank, batch: Batch, rows: int) -> Tensor:
        total = torch.zeros(())
        for k in range(len(teachers.rows)):
            with teachers.attached(torch.full((rows,), k)), self.model.computing():
                total = total + self.examples.logits(self.model.model, batch, all_rows=teachers.adapts_head)
        return total / len(teachers.rows)

    def _weights(self, seen: Seen[Item]) -> Tensor:
        """By example of the step, on the CPU: one over the number of targets in its batch; private: of its own."""
        counts: list[int] = []
        for examples in seen.values():
            if self.private:
                counts += [self.examples.num_targets([example]) for example in examples]
            else:
                counts += [self.examples.num_targets(examples)] * len(examples)
        exact = torch.promote_types(self.bank.rows.dtype, torch.float32)
        return torch.tensor(counts, dtype=torch.float64).reciprocal().to(exact)


def _unusable(job: Fit, examples: Examples) -> ClientError | None:
    """Why the job cannot be trained, if so. A private one must not tell what its batches hold: none is refused."""
    for step, indices in enumerate(job.batches if job.private is None else ()):
        if not examples.num_targets([job.examples[index] for index in indices]):
            return ClientError(
                f"client {job.site}: its batch of local step {step + 1} has no target token; "
                "give it examples with a response"
            )
    return None
