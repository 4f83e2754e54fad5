"""A step of Feddle's search, which projects one gradient on the anchors, against an autograd graph through the anchors,
and what a whole server round costs beside one pass of fine-tuning on the server's examples.

Times alternate in one process; the peak memory of a variant is that of a process of its own.

    python scripts/bench/search.py
    python scripts/bench/search.py --models resnet18 --size 224 --device cuda
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import ResNetConfig, ResNetForImageClassification, ViTConfig, ViTForImageClassification

from llm_fed.basics.rng import generator
from llm_fed.engine.drive import drive
from llm_fed.engine.engine import Engine
from llm_fed.kinds.images import Images
from llm_fed.method import Upload
from llm_fed.method.requests import Gradient
from llm_fed.method.server import Server
from llm_fed.method.site import Data
from llm_fed.methods import build
from llm_fed.models.cnn import CNN, SIZE
from llm_fed.models.images import head_of
from llm_fed.models.structure import Full, Structure
from llm_fed.settings.config import LocalConfig
from llm_fed.state import State
from llm_fed.tasks.common import Picture

CLASSES = 10
RESNET18: dict[str, Any] = {
    "depths": [2, 2, 2, 2], "layer_type": "basic", "hidden_sizes": [64, 128, 256, 512], "num_labels": CLASSES,
}  # fmt: skip
LOCAL = LocalConfig(steps=None, epochs=1, batch_size=32, lr=1e-3, lr_end=1e-3, optimizer="adam")
VARIANTS = ("project", "graph of one product", "graph of M terms")


def image_base(kind: str, size: int, device: str = "cpu") -> Images:
    """A random cnn, resnet18 or vit-b for pictures of `size`."""
    torch.manual_seed(0)
    model: nn.Module
    if kind == "cnn":
        model, size = CNN(CLASSES), SIZE
    elif kind == "resnet18":
        model = ResNetForImageClassification(ResNetConfig(**RESNET18))
    else:
        model = ViTForImageClassification(ViTConfig(image_size=size, num_labels=CLASSES))  # type: ignore[call-arg]
    labels = tuple(map(str, range(CLASSES)))
    model = nn.Module.to(model, device).eval()
    return Images(model=model, name=kind, labels=labels, size=size, head=head_of(model))


def pictures(count: int, size: int) -> list[Picture]:
    """Noise with labels."""
    pixels = torch.randint(256, (count, 3, size, size), generator=generator(0, "pixels"), dtype=torch.uint8)
    return [Picture(image, i % CLASSES, str(i % CLASSES)) for i, image in enumerate(pixels)]


def server_site(base: Images, structure: Structure, examples: int, clients: int, cohort: int, batch: int) -> Server:
    """A server with examples of its own."""
    local = LocalConfig(**{**vars(LOCAL), "batch_size": batch})
    data = Data(pictures(examples, base.size), num_labels=CLASSES)
    server = Server("server", structure, local, 0, partial(base.draw, structure), data)
    server.clients, server.cohort = tuple(f"c{i}" for i in range(clients)), cohort
    return server


def updates(start: State, count: int, scale: float = 1e-3) -> list[State]:
    """Random updates of a model."""
    draws = generator(0, "updates")
    return [start.like(scale * torch.randn(start.row.shape, generator=draws)) for _ in range(count)]


class Search:
    """The gradient of M coefficients, on one batch, in three ways."""

    def __init__(self, given: argparse.Namespace, kind: str):
        self.base = image_base(kind, given.size, given.device)
        self.engine = Engine(self.base)
        self.model = self.base.draw(Full(), generator(0))
        self.atlas = torch.stack([update.row for update in updates(self.model, given.anchors)])
        self.coefficients = torch.full((given.anchors,), 1 / given.anchors)
        self.batch = pictures(given.batch, self.base.size)
        flat = self.base.flat(Full())
        flat.load(self.model)
        self.module = flat.module
        device = self.base.device
        self.start = {name: tensor.to(device) for name, tensor in self.model.tensors().items()}
        rows = self.atlas.to(device)
        self.anchors = {
            name: rows[:, place].view(-1, *self.model.layout.shape_of[name])
            for name, place in self.model.layout.slices.items()
        }

    def step(self, variant: str) -> Tensor:
        """The gradient of the loss by the coefficients, (M,)."""
        if variant == "project":
            at = self.model.like(self.model.row + self.coefficients @ self.atlas)
            ((_, gradient),) = self.engine.execute([Gradient("server", Full(), at, self.batch)])
            return self.atlas @ gradient.row
        coefficients = self.coefficients.to(self.base.device).requires_grad_()
        merged = {
            name: start + (torch.tensordot(coefficients, self.anchors[name], 1) if variant == VARIANTS[1]
                           else sum(c * anchor for c, anchor in zip(coefficients, self.anchors[name], strict=True)))
            for name, start in self.start.items()
        }  # fmt: skip
        inputs = self.base.prepare(torch.stack([picture.pixels for picture in self.batch]))
        logits = functional_call(self.module, merged, kwargs={"pixel_values": inputs})
        labels = torch.tensor([picture.label for picture in self.batch], device=self.base.device)
        loss = nn.functional.cross_entropy(getattr(logits, "logits", logits), labels)
        return torch.autograd.grad(loss, coefficients)[0].cpu()


def clock(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def alternate(steps: dict[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each, taken in turn, after one turn to warm up. On a CPU, of its own time."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            begin = clock(device)
            step()
            if repeat:
                seconds[name].append(clock(device) - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak(given: argparse.Namespace, kind: str, variant: str) -> float:
    """MB that steps of `variant` take beyond the model and its anchors: the least of three processes of their own, for
    what an allocator does not give back at once only adds."""
    words = ["--models", kind, "--memory-of", variant, "--device", given.device, "--anchors", str(given.anchors)]
    words += ["--batch", str(given.batch), "--size", str(given.size)]
    command = [sys.executable, __file__, *words]
    outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return min(map(float, outputs)) / 1e6


def own_peak(given: argparse.Namespace) -> int:
    """Bytes that three steps take beyond what this process holds before them; on a CPU, Linux alone can say it."""
    search = Search(given, given.models[0])
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident size starts anew
        before = psutil.Process().memory_info().rss
    for _ in range(3):
        search.step(given.memory_of)
    if given.device == "cuda":
        return torch.cuda.max_memory_allocated() - before
    match = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024 - before


def step_table(given: argparse.Namespace) -> None:
    print(f"One search step, M = {given.anchors}, batch {given.batch}\n")
    print("| model | P | variant | time / projection's | peak memory over the model and its anchors, MB |")
    print("|---|---|---|---|---|")
    for kind in given.models:
        search = Search(given, kind)
        wanted = search.step(VARIANTS[0])
        for variant in VARIANTS[1:]:
            torch.testing.assert_close(search.step(variant), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))
        seconds = alternate({name: partial(search.step, name) for name in VARIANTS}, given.repeats, given.device)
        for name in VARIANTS:
            ratio, memory = seconds[name] / seconds[VARIANTS[0]], peak(given, kind, name)
            print(f"| {kind} | {search.model.row.numel():,} | {name} | {ratio:.2f} | {memory:.0f} |", flush=True)


def round_table(given: argparse.Namespace) -> None:
    print(f"\nA server round: {given.examples} examples, {given.anchors // 2} arrivals, atlas of {given.anchors}\n")
    print("| model | step of the server | time / one pass of fine-tuning |\n|---|---|---|")
    for kind in given.models:
        base = image_base(kind, given.size, given.device)
        engine, half = Engine(base), given.anchors // 2
        server = server_site(base, Full(), given.examples, 500, half, LOCAL.batch_size)
        model = server.initial()
        uploads = [Upload(f"c{i}", 10, 0, delta) for i, delta in enumerate(updates(model, half))]

        def work(coroutine, server=server, engine=engine):
            server.begin(1, 1e-3)
            (outcome,) = drive({"server": coroutine}, engine.execute).values()
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        steps = {"one pass of fine-tuning": lambda: work(server.fit(model, epochs=1))}  # noqa: B023
        for label, settings in {
            "fedbuff": {"name": "fedbuff", "buffer": half},
            "feddle, 1 epoch": {"name": "feddle", "search_epochs": 1},
            "feddle, 2 epochs": {"name": "feddle", "search_epochs": 2},
        }.items():
            method = build(settings)
            state = work(method.server_update(server, method.init(server), uploads))
            steps[label] = lambda m=method, s=state: work(m.server_update(server, s, uploads))  # type: ignore[misc]  # noqa: B023
        seconds = alternate(steps, given.rounds, given.device)
        for label, value in seconds.items():
            print(f"| {kind} | {label} | {value / seconds['one pass of fine-tuning']:.3f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["cnn", "resnet18"], default=["cnn", "resnet18"])
    parser.add_argument("--size", type=int, default=64, help="pixels of the ResNet's pictures")
    parser.add_argument("--anchors", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--examples", type=int, default=256, help="examples of the server")
    parser.add_argument("--repeats", type=int, default=7, help="how often a step is timed")
    parser.add_argument("--rounds", type=int, default=3, help="how often a round is timed")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory_of:
        print(own_peak(given))
        return
    print(f"torch {torch.__version__}, {given.device}, {torch.get_num_threads()} threads\n")
    step_table(given)
    round_table(given)


if __name__ == "__main__":
    main()
