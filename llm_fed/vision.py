"""The work that sites of an image model await, one site after another: training, losses, logits, gradients.

Shape letters: N images, C classes, H features, P parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from llm_fed.cohort import Request
from llm_fed.config import LocalConfig
from llm_fed.errors import ClientError, require
from llm_fed.flat import FlatModel
from llm_fed.models.images import ImageBase
from llm_fed.rng import derive
from llm_fed.state import State
from llm_fed.structure import Structure
from llm_fed.tasks.common import Picture
from llm_fed.training import OPTIMIZERS, Fitted, GradientOf, HeadJob, Job, Work

CHUNK = 500  # images of a forward pass without gradients


class VisionEngine:
    """Answers the requests of sites whose examples are pictures. Clients of a full model share no base that a fused
    pass would read once, so each trains alone.

    Attributes:
        work: images and optimizer steps of all training so far, as tokens and micro-batches.
    """

    def __init__(self, base: ImageBase, local: LocalConfig):
        require("local.optimizer", local.optimizer, OPTIMIZERS)
        self.base, self.local = base, local
        self.work = Work()
        self._models: dict[Structure, FlatModel] = {}

    def execute(self, requests: Sequence[Request]) -> list:
        """One result, or one exception, for each of these requests of equal kind and key."""
        return [_KINDS[request.kind](self, request.key, request.payload) for request in requests]  # type: ignore[operator]

    def fit(self, structure: Structure, job: Job) -> Fitted | ClientError:
        """Train from `job.start`; the loss is cross-entropy, or the divergence from the mean logits of the teachers."""
        teacher = self._teacher(structure, job)
        model = self._loaded(structure, job.start)
        segments = model.layout.segments(job.train)
        parameters = [nn.Parameter(model.row[segment]) for segment in segments]
        for parameter, segment in zip(parameters, segments, strict=True):
            parameter.grad = model.grads[segment]
        optimizer = OPTIMIZERS[self.local.optimizer](parameters, lr=job.lr)
        start, losses = model.row.clone(), []
        hint = f"(lr {job.lr:g}); lower local.lr or set local.clip"
        with _seeded(job.seed), _mode(model, training=True):
            for step, batch in enumerate(job.batches):
                loss = self._loss(model, batch, teacher)
                losses.append(float(loss.detach()))
                if not torch.isfinite(loss):
                    return ClientError(f"client {job.client}: loss is {losses[-1]} at local step {step + 1} {hint}")
                model.grads.zero_()
                loss.backward()
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
        state, pictures = payload
        model = self._loaded(structure, state)
        return self._outputs(pictures, lambda inputs: _logits(model.module(pixel_values=inputs)))

    def features(self, structure: Structure, payload: tuple[State, Sequence[Picture]]) -> Tensor:
        """(N, H), what the head reads, in float32, on the CPU."""
        state, pictures = payload
        model = self._loaded(structure, state)

        def body(inputs: Tensor) -> Tensor:
            with _read_by(model.module.get_submodule(self.base.head)) as seen:
                model.module(pixel_values=inputs)
            return seen[0]

        return self._outputs(pictures, body)

    def head(self, structure: Structure, job: HeadJob) -> State:
        """The linear head (weight, bias) that classifies the pictures' features best; the body stays as it is."""
        features = self.features(structure, (job.state, job.examples)).to(job.head.row)
        labels = _labels(job.examples)
        parameters = [nn.Parameter(tensor.clone()) for tensor in job.head.tensors().values()]
        optimizer = torch.optim.Adam(parameters, lr=job.lr)
        for batch in job.batches:
            optimizer.zero_grad()
            chosen = torch.tensor(batch)
            logits = nn.functional.linear(features[chosen], *parameters)
            nn.functional.cross_entropy(logits, labels[chosen]).backward()
            optimizer.step()
        return State.of(dict(zip(job.head, parameters, strict=True)))

    def gradient(self, structure: Structure, payload: GradientOf) -> tuple[float, State]:
        """The mean cross-entropy of the examples and its gradient, in evaluation mode.

        With another head the logits are that head's, and the gradient of the model's own head is zero.
        """
        model = self._loaded(structure, payload.state)
        inputs = self.base.prepare(_pixels(payload.examples))
        labels = _labels(payload.examples).to(inputs.device)
        model.grads.zero_()
        with self._autocast(), _mode(model, training=False):
            if payload.head is None:
                logits = _logits(model.module(pixel_values=inputs))
            else:
                weight, bias = (tensor.to(inputs) for tensor in payload.head.tensors().values())
                with _read_by(model.module.get_submodule(self.base.head)) as seen:
                    model.module(pixel_values=inputs)
                logits = nn.functional.linear(seen[0], weight, bias)
        loss = nn.functional.cross_entropy(logits.float() if logits.dtype.itemsize < 4 else logits, labels)
        loss.backward()
        return float(loss.detach()), State(model.layout, model.grads.cpu().clone())

    def _loaded(self, structure: Structure, state: State) -> FlatModel:
        if structure not in self._models:
            self._models[structure] = self.base.flat(structure)
        self._models[structure].load(state)
        return self._models[structure]

    def _loss(self, model: FlatModel, batch: Sequence[Picture], teacher: dict[int, Tensor] | None) -> Tensor:
        inputs = self.base.prepare(_pixels(batch))
        with self._autocast():
            logits = _logits(model.module(pixel_values=inputs))
        if teacher is None:
            return nn.functional.cross_entropy(logits, _labels(batch).to(logits.device))
        wanted = torch.stack([teacher[id(picture)] for picture in batch]).to(logits)
        found = logits.log_softmax(-1)
        return nn.functional.kl_div(found, wanted.log_softmax(-1), reduction="batchmean", log_target=True)

    def _teacher(self, structure: Structure, job: Job) -> dict[int, Tensor] | None:
        """By picture the mean of the teachers' logits, (C,); None without teachers."""
        if not job.teachers:
            return None
        pictures = list({id(picture): picture for batch in job.batches for picture in batch}.values())
        logits = [self.logits(structure, (state, pictures)) for state in job.teachers]
        mean = torch.stack(logits).mean(0)
        return {id(picture): row for picture, row in zip(pictures, mean, strict=True)}

    @torch.inference_mode()
    def _outputs(self, pictures: Sequence[Picture], compute: Callable[[Tensor], Tensor]) -> Tensor:
        found = []
        for at in range(0, len(pictures), CHUNK):
            with self._autocast():
                found.append(compute(self.base.prepare(_pixels(pictures[at : at + CHUNK]))).cpu())
        joined = torch.cat(found)
        return joined.to(torch.promote_types(joined.dtype, torch.float32))

    def _autocast(self) -> torch.autocast:
        device, dtype = self.base.device.type, self.base.autocast
        return torch.autocast(device, dtype, enabled=dtype is not None)


_KINDS = {
    "fit": VisionEngine.fit,
    "losses": VisionEngine.losses,
    "logits": VisionEngine.logits,
    "head": VisionEngine.head,
    "gradient": VisionEngine.gradient,
}


def _logits(output: object) -> Tensor:
    """Of our own models, or of transformers' image classifiers."""
    return output if isinstance(output, Tensor) else output.logits  # type: ignore[attr-defined]


def _pixels(pictures: Sequence[Picture]) -> Tensor:
    return torch.stack([picture.pixels for picture in pictures])


def _labels(pictures: Sequence[Picture]) -> Tensor:
    return torch.tensor([picture.label for picture in pictures])


@contextmanager
def _read_by(head: nn.Module) -> Iterator[list[Tensor]]:
    """What the head is given in the forward passes within."""
    seen: list[Tensor] = []
    handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def _mode(model: FlatModel, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode; after it, in the latter."""
    model.train(training)
    try:
        yield
    finally:
        model.train(False)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Dropout's draws within come from `seed`; the global generators are as before afterwards."""
    devices = range(torch.cuda.device_count())
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(derive(seed, "dropout"))
        yield
