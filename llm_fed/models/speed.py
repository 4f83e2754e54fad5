"""How fast this machine computes in bfloat16, measured, and whether other programs slow it down."""

from __future__ import annotations

import math
import os
import re
import time
from functools import cache
from pathlib import Path

import psutil
import torch

WORTH = 0.8  # times as long as float32: from here on bfloat16 is worth a line
CROWDED = 2.0  # processes that want to run, per core; a run alone makes 1


CPU = Path("/proc/cpuinfo")


def computes_in_bfloat16() -> bool | None:
    """Whether this CPU has instructions for bfloat16, by its flags (avx512_bf16, amx_bf16; of ARM bf16); None where the
    system does not say."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU.read_text(), re.MULTILINE) if CPU.is_file() else None
    return None if flags is None else any(flag.endswith("bf16") for flag in flags[1].split())


def seconds_in(dtype: torch.dtype, device: str) -> float:
    """A frozen linear layer, forward and backward: the best of up to five passes within half a second, after a first
    one."""
    size = 1024 if device == "cpu" else 4096  # of more, the backward pass takes many seconds on some CPUs in bfloat16
    weight = torch.ones(size, size, device=device, dtype=dtype)
    values = torch.ones(size // 32, size, device=device, dtype=dtype, requires_grad=True)
    best, until = math.inf, time.monotonic() + 0.5
    for number in range(6):
        start = time.perf_counter()
        (gradient,) = torch.autograd.grad(torch.nn.functional.linear(values, weight).sum(), values)
        gradient[0, 0].item()  # waits for the GPU
        if number:
            best = min(best, time.perf_counter() - start)
        if number and time.monotonic() > until:
            break
    return best


def ratio(device: str) -> float:
    """How many times as long bfloat16 takes as float32."""
    return seconds_in(torch.bfloat16, device) / seconds_in(torch.float32, device)


@cache
def hint() -> str:
    """A line for a CPU that computes faster in bfloat16; empty for another one."""
    slower = ratio("cpu")
    if slower > WORTH:
        return ""
    return (
        f"a layer takes {slower:.2g} times as long in bfloat16 as in float32 on this CPU (measured), so "
        "base.dtype=bfloat16 may train faster"
    )


def crowded() -> str:
    """A line for a CPU whose cores other programs want, too, while torch has several threads; empty otherwise.

    The threads of an operation wait for the last of them, so one that has no core holds up all. With 10 processes on
    two cores a step of SmolLM2-135M took 4.4 s with one thread, and 6 to 64 s with two.
    """
    cores, load = os.cpu_count() or 1, psutil.getloadavg()[0]
    if torch.get_num_threads() == 1 or load < CROWDED * cores:
        return ""
    return (
        f"{load:.0f} processes want the {cores} cores, and threads wait for each other: OMP_NUM_THREADS=1 may be much "
        "faster"
    )
