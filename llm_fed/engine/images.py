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

from llm_fed import signs
from llm_fed.config import LocalConfig
from llm_fed.engine.fit import OPTIMIZERS
from llm_fed.engine.image_adapters import ImageAdapterEngine, fit_head
from llm_fed.errors import ClientError, require
from llm_fed.losses import divergence
from llm_fed.models.flat import FlatModel
from llm_fed.models.images import ImageBase
from llm_fed.models.joined import Answer, full, respond
from llm_fed.models.lora import Lora
from llm_fed.models.structure import Structure
from llm_fed.requests import Fitted, GradientOf, HeadJob, Job, Request, Work
from llm_fed.rng import derive
from llm_fed.state import State
from llm_fed.tasks.common import Picture, labels_of, pixels_of

CHUNK = 500  # images of a forward pass without gradients


class VisionEngine:
    """Answers the requests of sites whose examples are pictures. Clients of a full model share no base that a fused
    pass would read once, so each trains alone; those of adapters do, see `image_adapters`.

    Attributes:
        work: images and optimizer steps of all training so far, as tokens and micro-batches.
    """

    def __init__(self, base: ImageBase, local: LocalConfig):
        require("local.optimizer", local.optimizer, OPTIMIZERS)
        self.base, self.local = base, local
        self.work = Work()
        self.adapters = ImageAdapterEngine(base, local)
        self._models: dict[Structure, FlatModel] = {}
        self.kind_of = self.adapters.kind_of

    def execute(self, requests: Sequence[Request]) -> Sequence[Any]:
        """One result, or one exception, for each of these requests of equal kind and key."""
        if isinstance(requests[0].key, Lora):
            results = self.adapters.execute(requests)
            self.work, self.adapters.work = self.work.plus(self.adapters.work), Work()
            return results
        return [_KINDS[request.kind](self, request.key, request.payload) for request in requests]  # type: ignore[operator]

    def fit(self, structure: Structure, job: Job) -> Fitted | ClientError:
        """Train from `job.start`; the loss is cross-entropy, or the divergence from the mean logits of the teachers."""
        teacher = self._teacher(structure, job)
        model = self._loaded(structure, job.start)
        groups, segments = _groups(model, job)
        optimizer = OPTIMIZERS[self.local.optimizer](groups, lr=job.lr)
        parameters = [parameter for group in groups for parameter in group["params"]]
        trained = [model.parameters[name] for names in segments for name in names]
        start, losses = job.start.row.to(model.row.device), []
        hint = f"(lr {job.lr:g}); lower local.lr or set local.clip"
        with _seeded(job.seed), _training(model):
            for step in range(len(job.batches)):
                batch = job.examples(step, self.local.augment)
                answer, labels = self._answer(structure, batch).map(full), labels_of(batch).to(model.row.device)
                if job.loss is not None:
                    loss = job.loss(answer, labels, torch.tensor(job.places[step], device=labels.device))
                elif teacher is not None:
                    wanted = torch.stack([teacher[id(picture)] for picture in batch])
                    loss = divergence(answer.logits, wanted.to(answer.logits)).mean()
                else:
                    loss = nn.functional.cross_entropy(answer.logits, labels)
                losses.append(loss.detach())
                # Gathered into the row at once: accumulating them there, as `backward` does, would take twice as long.
                found = iter(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
                for names, parameter in zip(segments, parameters, strict=True):
                    assert parameter.grad is not None  # a part of the row of gradients
                    torch.cat([next(found).reshape(-1) for _ in names], out=parameter.grad)
                if self.local.proximal:
                    model.grads.add_(model.row - start, alpha=2 * self.local.proximal)
                if self.local.clip is not None:
                    nn.utils.clip_grad_norm_(parameters, self.local.clip)
                optimizer.step()
                on_cpu = loss.device.type == "cpu"  # reading a GPU's loss would wait for it
                signs.step(step + 1, len(job.batches), loss=float(losses[-1]) if on_cpu else None)
        values = torch.stack(losses).tolist()  # read but once: every reading waits for the device
        for step, value in enumerate(values, 1):
            if not math.isfinite(value):
                return ClientError(f"client {job.client}: loss is {value} at local step {step} {hint}")
        images = sum(map(len, job.batches))
        self.work = self.work.plus(Work(images, images, len(job.batches)))
        state = model.read()
        if not (state.is_finite() and all(bool(extra.isfinite().all()) for extra in state.extras.values())):
            return ClientError(f"client {job.client}: not finite after {len(job.batches)} local steps {hint}")
        return Fitted(state, tuple(values))

    def losses(self, structure: Structure, payload: tuple[Sequence[State], Sequence[Picture]]) -> list[float]:
        """The mean cross-entropy of the pictures under each state."""
        states, pictures = payload
        labels = labels_of(pictures)
        logits = [self.logits(structure, (state, pictures)) for state in states]
        return [float(nn.functional.cross_entropy(found, labels)) for found in logits]

    def logits(self, structure: Structure, payload: tuple[State, Sequence[Picture]]) -> Tensor:
        """(N, C) in float32, on the CPU."""
        return self.answers(structure, payload).logits

    def answers(self, structure: Structure, payload: tuple[State, Sequence[Picture]]) -> Answer:
        """What the model, or models together, make of the pictures, in float32, on the CPU."""
        state, pictures = payload
        self._loaded(structure, state)
        with torch.no_grad():
            found = []
            for at in range(0, len(pictures), CHUNK):
                chunk = pictures[at : at + CHUNK]
                found.append(self._answer(structure, chunk).map(Tensor.cpu))
                signs.answered(len(chunk))
            return Answer.joined(found).map(full)

    def head(self, structure: Structure, job: HeadJob) -> State:
        """The linear head (weight, bias) that classifies the pictures' features best; the body stays as it is."""
        return fit_head(self.answers(structure, (job.state, job.examples)).features, job)

    def gradient(self, structure: Structure, payload: GradientOf) -> tuple[float, State]:
        """The mean cross-entropy of the examples and its gradient, in evaluation mode.

        With another head the logits are that head's, and the gradient of the model's own head is zero.
        """
        model = self._loaded(structure, payload.state)
        model.grads.zero_()
        answer = self._answer(structure, payload.examples)
        logits = answer.logits
        if payload.head is not None:
            weight, bias = (tensor.to(model.row) for tensor in payload.head.tensors().values())
            with self._autocast():
                logits = nn.functional.linear(answer.features, weight, bias)
        loss = nn.functional.cross_entropy(full(logits), labels_of(payload.examples).to(logits.device))
        loss.backward()
        return float(loss.detach()), State(model.layout, model.grads.cpu().clone())

    def _loaded(self, structure: Structure, state: State) -> FlatModel:
        if structure not in self._models:
            self._models[structure] = self.base.flat(structure)
        self._models[structure].load(state)
        return self._models[structure]

    def _answer(self, structure: Structure, pictures: Sequence[Picture]) -> Answer:
        """Of the model that is loaded."""
        inputs = self.base.prepare(pixels_of(pictures))
        with self._autocast():
            return respond(self._models[structure].module, inputs, self.base.head_in(structure))

    def _teacher(self, structure: Structure, job: Job) -> dict[int, Tensor] | None:
        """By picture the mean of the teachers' logits, (C,); None without teachers."""
        if not job.teachers:
            return None
        pictures = list({id(picture): picture for batch in job.batches for picture in batch}.values())
        logits = [self.logits(structure, (state, pictures)) for state in job.teachers]
        mean = torch.stack(logits).mean(0)
        return {id(picture): row for picture, row in zip(pictures, mean, strict=True)}

    def _autocast(self) -> torch.autocast:
        device, dtype = self.base.device.type, self.base.autocast
        return torch.autocast(device, dtype, enabled=dtype is not None)


_KINDS = {
    "fit": VisionEngine.fit,
    "losses": VisionEngine.losses,
    "logits": VisionEngine.logits,
    "answers": VisionEngine.answers,
    "head": VisionEngine.head,
    "gradient": VisionEngine.gradient,
}


def _groups(model: FlatModel, job: Job) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """For the optimizer the trained parts of the row, by learning rate, as parameters whose gradients are parts of the
    row of gradients; and for each part its entries."""
    trained = model.layout.matching(job.train)
    own = {name: pattern for pattern in job.lr_of for name in model.layout.matching(pattern)}
    groups, segments = [], []
    for pattern, lr in {"": job.lr, **job.lr_of}.items():
        names = [name for name in trained if own.get(name, "") == pattern]
        parameters = []
        for segment in model.layout.joined(names):
            parameter = nn.Parameter(model.row[segment])
            parameter.grad = model.grads[segment]
            parameters.append(parameter)
            within = model.layout.slices
            segments.append([name for name in names if segment.start <= within[name].start < segment.stop])
        groups.append({"params": parameters, "lr": lr})
    return groups, segments


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
