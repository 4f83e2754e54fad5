"""The work that sites of an image model await, one site after another: training, losses, logits, gradients.

Shape letters: N images, C classes, H features, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from llm_fed.cohort import Request
from llm_fed.config import LocalConfig
from llm_fed.errors import ClientError, require
from llm_fed.flat import FlatModel
from llm_fed.lora import Lora
from llm_fed.models.images import ImageBase
from llm_fed.models.joined import Answer, respond
from llm_fed.rng import derive
from llm_fed.state import State
from llm_fed.structure import Structure
from llm_fed.tasks.common import Picture
from llm_fed.training import OPTIMIZERS, Fitted, GradientOf, HeadJob, Job, Loss, Work
from llm_fed.vision_adapters import ImageAdapterEngine, fit_head

CHUNK = 500  # images of a forward pass without gradients


class VisionEngine:
    """Answers the requests of sites whose examples are pictures. Clients of a full model share no base that a fused
    pass would read once, so each trains alone; those of adapters do, see `vision_adapters`.

    Attributes:
        work: images and optimizer steps of all training so far, as tokens and micro-batches.
    """

    def __init__(self, base: ImageBase, local: LocalConfig):
        require("local.optimizer", local.optimizer, OPTIMIZERS)
        self.base, self.local = base, local
        self.work = Work()
        self.adapters = ImageAdapterEngine(base, local)
        self._models: dict[Structure, FlatModel] = {}

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
        with _seeded(job.seed), _mode(model, training=True):
            for step, batch in enumerate(job.batches):
                loss = self._loss(structure, model, batch, teacher, job.loss, job.places[step] if job.loss else ())
                losses.append(float(loss.detach()))
                if not torch.isfinite(loss):
                    return ClientError(f"client {job.client}: loss is {losses[-1]} at local step {step + 1} {hint}")
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
        images = sum(map(len, job.batches))
        self.work = self.work.plus(Work(images, images, len(job.batches)))
        state = model.read()
        if not (state.is_finite() and all(bool(extra.isfinite().all()) for extra in state.extras.values())):
            return ClientError(f"client {job.client}: not finite after {len(job.batches)} local steps {hint}")
        return Fitted(state, tuple(losses))

    def losses(self, structure: Structure, payload: tuple[Sequence[State], Sequence[Picture]]) -> list[float]:
        """The mean cross-entropy of the pictures under each state."""
        states, pictures = payload
        labels = _labels(pictures)
        logits = [self.logits(structure, (state, pictures)) for state in states]
        return [float(nn.functional.cross_entropy(found, labels)) for found in logits]

    def logits(self, structure: Structure, payload: tuple[State, Sequence[Picture]]) -> Tensor:
        """(N, C) in float32, on the CPU."""
        return self.answers(structure, payload).logits

    def answers(self, structure: Structure, payload: tuple[State, Sequence[Picture]]) -> Answer:
        """What the model, or models together, make of the pictures, in float32, on the CPU."""
        state, pictures = payload
        model, found = self._loaded(structure, state), []
        for at in range(0, len(pictures), CHUNK):
            inputs = self.base.prepare(_pixels(pictures[at : at + CHUNK]))
            with torch.no_grad(), self._autocast():
                found.append(respond(model.module, inputs, self.base.head_in(structure)).map(Tensor.cpu))
        return Answer.joined(found).map(_full)

    def head(self, structure: Structure, job: HeadJob) -> State:
        """The linear head (weight, bias) that classifies the pictures' features best; the body stays as it is."""
        return fit_head(self.answers(structure, (job.state, job.examples)).features, job)

    def gradient(self, structure: Structure, payload: GradientOf) -> tuple[float, State]:
        """The mean cross-entropy of the examples and its gradient, in evaluation mode.

        With another head the logits are that head's, and the gradient of the model's own head is zero.
        """
        model = self._loaded(structure, payload.state)
        inputs = self.base.prepare(_pixels(payload.examples))
        labels = _labels(payload.examples).to(inputs.device)
        model.grads.zero_()
        with self._autocast(), _mode(model, training=False):
            answer = respond(model.module, inputs, self.base.head_in(structure))
            logits = answer.logits
            if payload.head is not None:
                weight, bias = (tensor.to(inputs) for tensor in payload.head.tensors().values())
                logits = nn.functional.linear(answer.features, weight, bias)
        loss = nn.functional.cross_entropy(_full(logits), labels)
        loss.backward()
        return float(loss.detach()), State(model.layout, model.grads.cpu().clone())

    def _loaded(self, structure: Structure, state: State) -> FlatModel:
        if structure not in self._models:
            self._models[structure] = self.base.flat(structure)
        self._models[structure].load(state)
        return self._models[structure]

    def _loss(
        self,
        structure: Structure,
        model: FlatModel,
        batch: Sequence[Picture],
        teacher: dict[int, Tensor] | None,
        loss: Loss | None,
        places: Sequence[int],
    ) -> Tensor:
        inputs = self.base.prepare(_pixels(batch))
        with self._autocast():
            answer = respond(model.module, inputs, self.base.head_in(structure)).map(_full)
        if loss is not None:
            return loss(answer, _labels(batch).to(inputs.device), torch.tensor(places, device=inputs.device))
        if teacher is None:
            return nn.functional.cross_entropy(answer.logits, _labels(batch).to(inputs.device))
        wanted = torch.stack([teacher[id(picture)] for picture in batch]).to(answer.logits)
        found = answer.logits.log_softmax(-1)
        return nn.functional.kl_div(found, wanted.log_softmax(-1), reduction="batchmean", log_target=True)

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


def _full(values: Tensor) -> Tensor:
    """In float32 at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _pixels(pictures: Sequence[Picture]) -> Tensor:
    return torch.stack([picture.pixels for picture in pictures])


def _labels(pictures: Sequence[Picture]) -> Tensor:
    return torch.tensor([picture.label for picture in pictures])


@contextmanager
def _mode(model: FlatModel, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode; after it, in the latter."""
    model.module.train(training)
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
