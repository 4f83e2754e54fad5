"""How fast this machine computes in bfloat16, measured."""

from __future__ import annotations

import math
import time
from functools import cache

import torch

WORTH = 0.8  # times as long as float32: from here on bfloat16 is worth a line


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
