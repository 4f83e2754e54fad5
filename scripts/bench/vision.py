"""Training of image clients: the engine, and a whole round of FedAvg, against a plain PyTorch loop over as many batches
and against all clients at once through `torch.func.vmap`, and what the engine's choices save.

    python scripts/bench/vision.py [--model cnn] [--clients 10] [--images 120] [--epochs 1] [--repeats 5] [--rounds 5]
        [--device cpu]

Random images, Adam, batch 32. The variants alternate; a time is the median over repeats, in CPU or GPU seconds
per round of all clients, beside the plain loop's. The second table is of --rounds rounds together.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from alternating import compare
from torch import nn

from llm_fed.basics.rng import generator
from llm_fed.engine.engine import Engine
from llm_fed.federation.clients import LocalClients
from llm_fed.federation.loop import Federation, federate
from llm_fed.federation.schedule import Synchronous
from llm_fed.kinds.images import Images, load_images, placed
from llm_fed.method.client import Client
from llm_fed.method.optimizer import Optimizer
from llm_fed.method.requests import Fit
from llm_fed.method.server import Server
from llm_fed.method.site import Data
from llm_fed.methods.fedit import FedIT
from llm_fed.models.structure import Full
from llm_fed.runs.folder import Run
from llm_fed.runtime.local import LocalRuntime
from llm_fed.settings import configfile
from llm_fed.settings.config import BaseConfig, Dtype, LocalConfig
from llm_fed.tasks.common import Picture

LABELS = tuple(map(str, range(10)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="cnn", help="the image model: cnn, cnn-1 ... cnn-5, resnet-9 ...")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--images", type=int, default=120, help="images per client")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of FedAvg")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    jobs, base = make(given, given.device)
    variants: dict[str, Callable[[], object]] = {
        "plain loop": lambda: [plain(base, job, torch.channels_last) for job in jobs],
        "plain loop, channels first": lambda: [plain(base, job, torch.contiguous_format) for job in jobs],
        "all clients at once, vmap": lambda: at_once(base, jobs),
        "engine": engine(given, "float32", jobs),
        "engine, augmented": engine(given, "float32", jobs, "crop-flip"),
        "engine, bfloat16": engine(given, "bfloat16", jobs),
    }
    if given.device != "cpu":
        variants["engine, pictures on the host"] = engine(given, "float32", make(given, "cpu")[0])
    compare(variants, given.repeats, given.device)
    print()
    rounds: dict[str, Callable[[], object]] = {
        "plain loop": lambda: [plain(base, job, torch.channels_last) for _ in range(given.rounds) for job in jobs],
        "FedAvg": fedavg(given, jobs),
    }
    compare(rounds, given.repeats, given.device)


def make(given: argparse.Namespace, device: str) -> tuple[list[Fit], Images]:
    """The clients' jobs, their pictures on `device`."""
    base = load_images(BaseConfig(name=given.model, dtype="float32"), LABELS, given.device)
    start = base.draw(Full(), generator(0))
    jobs = []
    for client in range(given.clients):
        pixels = torch.randint(0, 256, (given.images, 3, 32, 32), dtype=torch.uint8, generator=generator(0, client))
        pictures = placed([Picture(image, i % 10, "") for i, image in enumerate(pixels)], torch.device(device))
        batches = [pictures[at : at + 32] for at in range(0, len(pictures), 32)] * given.epochs
        jobs.append(Fit.on(f"c{client}", Full(), start, batches, Optimizer(1e-3, "adam")))
    return jobs, base


def engine(
    given: argparse.Namespace, dtype: Dtype, jobs: list[Fit], augment: Literal["crop-flip"] | None = None
) -> Callable[[], object]:
    base = load_images(BaseConfig(name=given.model, dtype=dtype), LABELS, given.device)
    runner = Engine(base)
    return lambda: [runner.fit_whole(replace(job, augment=augment)) for job in jobs]


def fedavg(given: argparse.Namespace, jobs: list[Fit]) -> Callable[[], object]:
    """A run's rounds on the jobs' pictures: messages, training, the checks of answers, the server's mean, metrics and
    checkpoints."""
    local = LocalConfig(steps=None, epochs=given.epochs, batch_size=32, lr=1e-3, optimizer="adam")
    base = load_images(BaseConfig(name=given.model, dtype="float32"), LABELS, given.device)
    runtime = LocalRuntime(Engine(base), len(jobs))
    rate = {"lr": local.lr, "lr_end": local.lr}
    config = configfile.from_dict({"rounds": given.rounds, "adapter": None, "local": rate})

    def site(id: str, train: Sequence[Picture]) -> Client:
        return Client(id, Full(), local, 0, partial(base.draw, Full()), Data(train, num_labels=len(LABELS)))

    def server() -> Server:
        return Server("server", Full(), local, 0, partial(base.draw, Full()), Data((), num_labels=len(LABELS)))

    def run() -> None:
        clients = {job.site: site(job.site, pictures_of(job, given.images)) for job in jobs}
        with TemporaryDirectory() as folder, Run(Path(folder) / "run", config) as run:
            run.begin()
            local_clients = LocalClients(clients, Synchronous(tuple(clients), seed=0), runtime)
            federate(Federation(FedIT(), local_clients, server(), runtime), run)

    return run


def pictures_of(job: Fit, count: int) -> list[Picture]:
    """What the first epoch of a job sees."""
    return list(job.examples[:count])


def plain(base: Images, job: Any, layout: torch.memory_format) -> nn.Module:
    """What one would write for one client."""
    model = copy.deepcopy(base.model).train()
    model.load_state_dict(job.start.tensors(), strict=False)  # statistics of batches begin anew
    optimizer = torch.optim.Adam(model.parameters(), lr=job.optimizer.lr)
    for step in range(len(job.batches)):
        batch = job.batch(step)
        inputs = base.prepare(torch.stack([picture.pixels for picture in batch])).contiguous(memory_format=layout)
        labels = torch.tensor([picture.label for picture in batch]).to(inputs.device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return model


def at_once(base: Images, jobs: list[Fit]) -> dict[str, torch.Tensor]:
    """The clients' parameters stacked, one batch of each in every step; statistics of batches are not kept."""
    device = base.device
    parameters = {
        name: torch.stack([job.start[name] for job in jobs]).to(device).requires_grad_(True) for name in jobs[0].start
    }
    optimizer = torch.optim.Adam(parameters.values(), lr=jobs[0].optimizer.lr)
    module = copy.deepcopy(base.model).train()
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None

    def loss(own: dict[str, torch.Tensor], inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(torch.func.functional_call(module, own, (inputs,)), labels)

    for step in range(len(jobs[0].batches)):
        batches = [job.batch(step) for job in jobs]
        pixels = torch.stack([picture.pixels for batch in batches for picture in batch])
        inputs = base.prepare(pixels).unflatten(0, (len(jobs), -1))
        labels = torch.tensor([[picture.label for picture in batch] for batch in batches]).to(device)
        optimizer.zero_grad()
        torch.func.vmap(loss)(parameters, inputs, labels).sum().backward()
        optimizer.step()
    return parameters


if __name__ == "__main__":
    main()
