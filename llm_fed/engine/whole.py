"""Whole models of clients, which share nothing that a fused pass would read once: each trains and answers alone.

Shape letters: N examples, C classes, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llm_fed.basics import signs
from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import derive
from llm_fed.engine.examples import Batch, Item
from llm_fed.engine.steps import Steps, fitted
from llm_fed.engine.trainable import Trainable
from llm_fed.method.losses import divergence
from llm_fed.method.requests import Fit, Fitted, Gradient, Work
from llm_fed.models.joined import Answer, full
from llm_fed.models.structure import Structure
from llm_fed.state import State

CHUNK = 500  # examples of a forward pass without gradients


class WholeModel:
    """The model, or models side by side, of one structure; a client's state is loaded into it for each request.
    `examples`: what is known of the examples that it is given."""

    def __init__(self, base: Trainable, structure: Structure):
        self.examples = base.examples(structure)
        self._base, self._flat = base, base.flat(structure)

    def fit(self, job: Fit) -> tuple[Fitted | ClientError, Work]:
        """Train from `job.start`; the loss is cross-entropy, or the divergence from the mean logits of the teachers."""
        if job.private is not None:
            raise ValueError("noisy steps are of adapters alone, but this trains a whole model")
        wanted, model = self._wanted(job), self._flat
        model.load(job.start)
        steps, losses = Steps({0: job}, model.row[None], model.grads[None], model.layout), []
        trained = [model.parameters[name] for names in steps.segments for name in names]
        with _training(model.module, job.seed):
            for step in range(len(job.batches)):
                loss = self._loss(job, step, wanted)
                losses.append(loss.detach())
                # Gathered into the row at once: accumulating them there, as `backward` does, would take twice as long.
                gradients = iter(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
                for names, parameter in zip(steps.segments, steps.parameters[0], strict=True):
                    assert parameter.grad is not None  # a part of the row of gradients
                    torch.cat([next(gradients).reshape(-1) for _ in names], out=parameter.grad)
                steps.step([0])
                on_cpu = loss.device.type == "cpu"  # reading a GPU's loss would wait for it
                signs.listener.get().step(step + 1, len(job.batches), float(losses[-1]) if on_cpu else None)
        count = sum(map(len, job.batches))
        # Losses are read but once: every reading waits for the device.
        return fitted(job, model.read(), torch.stack(losses).tolist()), Work(count, count, len(job.batches))

    def _loss(self, job: Fit, step: int, wanted: Tensor | None) -> Tensor:
        batch, indices = self.examples.collate(job.batch(step)), torch.tensor(job.batches[step])
        answer, labels = self._forward(batch).map(full), batch.labels.to(self._flat.row.device)
        if wanted is not None:
            return divergence(answer.logits, wanted[indices].to(answer.logits)).mean()
        if callable(job.loss):
            return job.loss(answer, labels, indices.to(labels.device))
        return nn.functional.cross_entropy(answer.logits, labels)

    def answer(self, state: State, examples: Sequence[Item]) -> Answer:
        """What the models under `state` make of examples, each and together, in float32 at least, on the CPU."""
        self._flat.load(state)
        with torch.no_grad():
            answers = []
            for at in range(0, len(examples), CHUNK):
                chunk = examples[at : at + CHUNK]
                answers.append(self._forward(self.examples.collate(chunk)).map(Tensor.cpu))
                signs.listener.get().answered(len(chunk))
            return Answer.joined(answers).map(full)

    def gradient(self, requested: Gradient) -> tuple[float, State]:
        """The mean cross-entropy of the examples and its gradient, in evaluation mode. With another head the logits are
        that head's, and the gradient of the model's own head is zero."""
        model = self._flat
        model.load(requested.state)
        model.grads.zero_()
        examples = self.examples if requested.head is None else self.examples.under_head(requested.head)
        batch = examples.collate(requested.examples)
        with self._base.computing():
            logits = examples.logits(model.module, batch)
        loss = nn.functional.cross_entropy(logits, batch.labels.to(logits.device))
        loss.backward()
        return float(loss.detach()), State(model.layout, model.grads.cpu().clone())

    def _forward(self, batch: Batch) -> Answer:
        """Of the state that is loaded."""
        with self._base.computing():
            return self.examples.answer(self._flat.module, batch)

    def _wanted(self, job: Fit) -> Tensor | None:
        """(N, C): the mean of the teachers' logits for each of the job's examples; None without teachers."""
        if not job.teachers:
            return None
        used = sorted({index for indices in job.batches for index in indices})
        examples = [job.examples[index] for index in used]
        mean = torch.stack([self.answer(state, examples).logits for state in job.teachers]).mean(0)
        wanted = mean.new_zeros(len(job.examples), mean.shape[1])
        wanted[used] = mean
        return wanted


@contextmanager
def _training(module: nn.Module, seed: int) -> Iterator[None]:
    """A module in training mode, elsewhere it is in evaluation mode. Dropout's draws within come from `seed`; global
    generators are as before afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(derive(seed, "dropout"))
        module.train()
        try:
            yield
        finally:
            module.eval()
