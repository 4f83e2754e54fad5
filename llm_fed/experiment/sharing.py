"""What each of several processes on one machine may take of it: threads, memory and GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from llm_fed.basics import cgroups
from llm_fed.basics.errors import UserError
from llm_fed.experiment.costs import in_words

_GPU_SHARE = "LLM_FED_GPU_MEMORY"  # bytes that a process may take of its GPU, see `keep_to_share`
_DEVICES = "CUDA_VISIBLE_DEVICES"
_CONTEXT = 2**29  # bytes of a GPU that a process takes beside its tensors; reasoned, not measured


@dataclass(frozen=True)
class Demand:
    """What processes take of a memory that they share, in bytes.

    Attributes:
        processes: how many share it.
        start: what each of them takes before it trains: base, data and libraries.
        training: what training adds in one of them, where that was measured.
        free: what is there for all of them.
        of: "" is the memory of the machine, else of a GPU.
    """

    processes: int
    start: int
    training: int
    free: int
    of: str = ""

    @property
    def in_words(self) -> str:
        step = f" and {in_words(self.start + self.training)} in training" if self.training else ""
        return (
            f"{self.processes} at a time, each of which takes about {in_words(self.start)}{self.of} before it trains"
            f"{step}; {in_words(self.free)} are free"
        )

    def check(self, jobs: int) -> None:
        """Refuse processes that do not fit even before they train; UserError says how many would."""
        if self.processes * self.start > self.free:
            most = max(1, self.free // max(1, self.start + self.training)) * jobs // self.processes
            raise UserError(f"--jobs {jobs} does not fit: {self.in_words}. --jobs {most} needs less")


def demands(processes: int, base: int, training: int, device: torch.device, spread: bool) -> list[Demand]:
    """What so many processes will take, each as much as this one, which has loaded a base and gives it back.

    Args:
        base: bytes of its weights.
        training: bytes that a step takes beside it, as far as that was measured.
        spread: whether the processes are divided among the GPUs.
    """
    here, on_cpu = psutil.Process().memory_full_info().uss, device.type == "cpu"
    free = cgroups.free_for_all() + (base if on_cpu else 0)
    found = [Demand(processes, here, training if on_cpu else 0, free)]
    if not on_cpu:
        each = -(-processes // (torch.cuda.device_count() if spread else 1))
        left = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
        found.append(Demand(each, base + _CONTEXT, training, left, f" of {device}"))
    return found


def shares(processes: int, device: torch.device, spread: bool) -> list[dict[str, str]]:
    """The variables that so many processes get, which then keep to an equal part of what is there. Several GPUs are
    given out in turn."""
    common = {cgroups.SHARE: str(cgroups.free_for_all() // processes)}
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))
    if device.type != "cuda":
        return [common] * processes
    names = [name for name in os.environ.get(_DEVICES, "").split(",") if name]
    names = names or [str(number) for number in range(torch.cuda.device_count())]
    each = -(-processes // (len(names) if spread else 1))
    common[_GPU_SHARE] = str(max(0, torch.cuda.mem_get_info(device)[0] // each - _CONTEXT))
    if not spread or len(names) == 1:
        return [common] * processes
    return [{**common, _DEVICES: names[number % len(names)]} for number in range(processes)]


def keep_to_share() -> None:
    """In a process that got its variables from `shares`: take no more of the GPU, where a pass that does not fit is
    then divided and does not take what another process counts on."""
    share = os.environ.get(_GPU_SHARE, "")
    if share.isdigit() and torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction(min(1.0, int(share) / total))
