"""The work that sites of an image model await, one site after another: training, losses, logits, gradients.

Shape letters: N images, C classes, H features, P parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.basics import signs
from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import derive
from llm_fed.engine.answering import Answering, answers_each
from llm_fed.engine.image_adapters import ImageAdapterEngine, fit_head
from llm_fed.engine.steps import Steps
from llm_fed.method.losses import divergence
from llm_fed.method.requests import Answers, Fit, FitHead, Fitted, Gradient, Logits, MeanLosses, Request, Work
from llm_fed.models.flat import FlatModel
from llm_fed.models.images import ImageBase
from llm_fed.models.joined import Answer, full, respond
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.state import State
from llm_fed.tasks.common import Picture, labels_of, pixels_of

CHUNK = 500  # images of a forward pass without gradients


class VisionEngine(Answering):
    """Answers the requests of sites whose examples are pictures. Clients of a full model share no base that a fused
    pass would read once, so each trains alone; those of adapters do, see `image_adapters`.

    Attributes:
        work: images and optimizer steps of all training so far, as tokens and micro-batches.
    """

    of = "whole image models"

    def __init__(self, base: ImageBase):
        super().__init__()
        self.base = base
        self.adapters = ImageAdapterEngine(base)
        self._models: dict[Structure, FlatModel] = {}
        self.kind_of = self.adapters.kind_of

    def execute(self, requests: Sequence[Request[Any]]) -> Sequence[Any]:
        """One result, or one exception, for each of these requests of one type and structure."""
        if isinstance(requests[0].structure, Lora):
            return self.adapters.execute(requests)
        return super().execute(requests)

    def take_work(self) -> Work:
        """The training work since the last call."""
        return super().take_work().plus(self.adapters.take_work())

    @answers_each(Fit)
    def fit(self, job: Fit) -> Fitted | ClientError:
        """Train from `job.start`; the loss is cross-entropy, or the divergence from the mean logits of the teachers."""
        if job.private is not None:
            raise ValueError("noisy steps are of adapters alone, but this trains a whole model")
        wanted = self._wanted(job)
        model = self.loaded(job.structure, job.start)
        steps, losses = Steps({0: job}, model.row[None], model.grads[None], model.layout), []
        trained = [model.parameters[name] for names in steps.segments for name in names]
        hint = f"(lr {job.optimizer.lr:g}); lower local.lr or set local.clip"
        with _seeded(job.seed), _training(model):
            for step in range(len(job.batches)):
                batch, places = job.batch(step), torch.tensor(job.batches[step])
                answer, labels = self._answer(job.structure, batch).map(full), labels_of(batch).to(model.row.device)
                if wanted is not None:
                    loss = divergence(answer.logits, wanted[places].to(answer.logits)).mean()
                elif callable(job.loss):
                    loss = job.loss(answer, labels, places.to(labels.device))
                else:
                    loss = nn.functional.cross_entropy(answer.logits, labels)
                losses.append(loss.detach())
                # Gathered into the row at once: accumulating them there, as `backward` does, would take twice as long.
                found = iter(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
                for names, parameter in zip(steps.segments, steps.parameters[0], strict=True):
                    assert parameter.grad is not None  # a part of the row of gradients
                    torch.cat([next(found).reshape(-1) for _ in names], out=parameter.grad)
                steps.step([0])
                on_cpu = loss.device.type == "cpu"  # reading a GPU's loss would wait for it
                signs.step(step + 1, len(job.batches), loss=float(losses[-1]) if on_cpu else None)
        values = torch.stack(losses).tolist()  # read but once: every reading waits for the device
        for step, value in enumerate(values, 1):
            if not math.isfinite(value):
                return ClientError(f"client {job.site}: loss is {value} at local step {step} {hint}")
        images = sum(map(len, job.batches))
        self.work = self.work.plus(Work(images, images, len(job.batches)))
        state = model.read()
        if not state.is_finite():
            return ClientError(f"client {job.site}: weights not finite after {len(job.batches)} local steps {hint}")
        return Fitted(state, tuple(values), {} if job.moments is None else steps.moments(0))

    @answers_each(MeanLosses)
    def mean_losses(self, asked: MeanLosses) -> list[float]:
        """The mean cross-entropy of the pictures under each state."""
        labels = labels_of(asked.examples)
        logits = [self._answer_all(asked.structure, state, asked.examples).logits for state in asked.states]
        return [float(nn.functional.cross_entropy(found, labels)) for found in logits]

    @answers_each(Logits)
    def logits(self, asked: Logits) -> Tensor:
        """(N, C) in float32, on the CPU."""
        return self._answer_all(asked.structure, asked.state, asked.examples).logits

    @answers_each(Answers)
    def answers(self, asked: Answers) -> Answer:
        """What the model, or models together, make of the pictures, in float32, on the CPU."""
        return self._answer_all(asked.structure, asked.state, asked.examples)

    @answers_each(FitHead)
    def head(self, asked: FitHead) -> State:
        """The linear head (weight, bias) that classifies the pictures' features best; the body stays as it is."""
        return fit_head(self._answer_all(asked.structure, asked.state, asked.examples).features, asked)

    @answers_each(Gradient)
    def gradient(self, asked: Gradient) -> tuple[float, State]:
        """The mean cross-entropy of the examples and its gradient, in evaluation mode.

        With another head the logits are that head's, and the gradient of the model's own head is zero.
        """
        model = self.loaded(asked.structure, asked.state)
        model.grads.zero_()
        answer = self._answer(asked.structure, asked.examples)
        logits = answer.logits
        if asked.head is not None:
            weight, bias = (tensor.to(model.row) for tensor in asked.head.tensors().values())
            with self._autocast():
                logits = nn.functional.linear(answer.features, weight, bias)
        loss = nn.functional.cross_entropy(full(logits), labels_of(asked.examples).to(logits.device))
        loss.backward()
        return float(loss.detach()), State(model.layout, model.grads.cpu().clone())

    def loaded(self, structure: Structure, state: State) -> FlatModel:
        """The model of a structure, with this state."""
        if structure not in self._models:
            self._models[structure] = self.base.flat(structure)
        self._models[structure].load(state)
        return self._models[structure]

    def _answer_all(self, structure: Structure, state: State, pictures: Sequence[Picture]) -> Answer:
        self.loaded(structure, state)
        with torch.no_grad():
            found = []
            for at in range(0, len(pictures), CHUNK):
                chunk = pictures[at : at + CHUNK]
                found.append(self._answer(structure, chunk).map(Tensor.cpu))
                signs.answered(len(chunk))
            return Answer.joined(found).map(full)

    def _answer(self, structure: Structure, pictures: Sequence[Picture]) -> Answer:
        """Of the model that is loaded."""
        inputs = self.base.prepare(pixels_of(pictures))
        with self._autocast():
            return respond(self._models[structure].module, inputs, self.base.head_in(structure))

    def _wanted(self, job: Fit) -> Tensor | None:
        """(N, C): the mean of the teachers' logits for each of the job's examples; None without teachers."""
        if not job.teachers:
            return None
        used = sorted({place for places in job.batches for place in places})
        pictures = [job.examples[place] for place in used]
        mean = torch.stack([self._answer_all(job.structure, state, pictures).logits for state in job.teachers]).mean(0)
        wanted = mean.new_zeros(len(job.examples), mean.shape[1])
        wanted[used] = mean
        return wanted

    def _autocast(self) -> torch.autocast:
        device, dtype = self.base.device.type, self.base.autocast
        return torch.autocast(device, dtype, enabled=dtype is not None)


@contextmanager
def _training(model: FlatModel) -> Iterator[None]:
    """The model in training mode, elsewhere it is in evaluation mode."""
    model.module.train()
    try:
        yield
    finally:
        model.module.eval()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Dropout's draws within come from `seed`; the global generators are as before afterwards."""
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive(seed, "dropout"))
        yield
