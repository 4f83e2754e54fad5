"""A federation without a language model: each client pulls one vector towards its own target, in closed form."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from llm_fed.basics.errors import ClientError
from llm_fed.basics.rng import Secret
from llm_fed.federation.schedule import Ask, Delayed
from llm_fed.method.client import Client
from llm_fed.method.requests import Fit, Fitted, Work
from llm_fed.method.server import Server
from llm_fed.method.site import Data, Site
from llm_fed.runs import secrecy
from llm_fed.runtime.local import drive
from llm_fed.settings.config import LocalConfig
from llm_fed.settings.configfile import from_dict
from llm_fed.state import State

STEP = 0.5  # share of the way to the target that one local step goes


class Structure(str):
    """Of numbers that clients of one pass share."""

    fused = True


STRUCTURE = Structure("toy")


def draw(generator: torch.Generator) -> State:
    """Two layers with a matrix A and a zero matrix B each, named as a LLaMA's adapter entries are."""
    entries: dict[str, torch.Tensor] = {}
    for layer in range(2):
        entries[f"model.layers.{layer}.q.lora_A"] = torch.randn(2, 3, generator=generator, dtype=torch.float64)
        entries[f"model.layers.{layer}.q.lora_B"] = torch.zeros(3, 2, dtype=torch.float64)
    return State.of(entries)


def number(value: float) -> State:
    return State.of({"x": torch.tensor([value], dtype=torch.float64)})


def clients(number: int, seed: int = 0, sizes: list[int] | None = None) -> dict[str, Site]:
    """Sites c0, c1, ... with `sizes` examples (default 1, 2, ...)."""
    sizes = sizes or list(range(1, number + 1))
    local = LocalConfig(steps=2, batch_size=1)
    return {f"c{i}": Client(f"c{i}", STRUCTURE, local, seed, draw, Data([i] * sizes[i])) for i in range(number)}  # type: ignore[arg-type, list-item]


def secret(number: int = 0) -> Secret:
    return Secret(f"{number:064x}")


def plant(folder: Path, number: int = 0) -> None:
    """Let the run that will begin there draw from a known secret."""
    folder.mkdir()
    (folder / secrecy.FILE).write_text(secret(number).key)


def server(seed: int = 0) -> Site:
    return Server("server", STRUCTURE, LocalConfig(), seed, draw)  # type: ignore[arg-type]


@dataclass
class ToyRuntime:
    """Fits by moving a share STEP of the way to the client's target, once per step; can be told to fail or poison."""

    targets: dict[str, float]
    fail: set[str] = field(default_factory=set)
    log: list[tuple[int, str]] = field(default_factory=list)

    def run(self, work: Any) -> dict[str, Any]:
        return drive(work, lambda requests: [self._fit(request) for request in requests])

    def take_work(self) -> Work:
        return Work()

    def _fit(self, job: Fit) -> Any:
        self.log.append((len(job.batches), job.site))
        if job.site in self.fail:
            return ClientError(f"client {job.site}: told to fail")
        row = job.start.row
        for _ in job.batches:
            row = row + STEP * (self.targets[job.site] - row)
        return Fitted(job.start.like(row), tuple(float(abs(self.targets[job.site] - row).mean()) for _ in job.batches))


@dataclass(frozen=True)
class LateSchedule:
    """Everybody is asked in every third round; client ci answers i rounds later."""

    names: tuple[str, ...]

    def asks(self, round: int) -> list[Ask]:
        return [Ask(name, i) for i, name in enumerate(self.names)] if round % 3 == 1 else []


def everyone(names: Any) -> Delayed:
    return Delayed(tuple(names))


def config(**settings: Any) -> Any:
    return from_dict({"eval": {"every": 0}, "local": {"lr": 0.1, "lr_end": 0.1}, **settings})
