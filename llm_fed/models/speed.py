"""Whether this CPU computes in bfloat16, by its flags, and whether other programs slow it down."""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import torch

CROWDED = 2.0  # processes that want to run, per core; a run alone makes 1
CPU = Path("/proc/cpuinfo")


def computes_in_bfloat16() -> bool | None:
    """Whether this CPU has instructions for bfloat16, by its flags (avx512_bf16, amx_bf16; of ARM bf16); None where the
    system does not say."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU.read_text(), re.MULTILINE) if CPU.is_file() else None
    return None if flags is None else any(flag.endswith("bf16") for flag in flags[1].split())


def hint() -> str:
    """A line for a CPU that computes in bfloat16; empty for another one."""
    return "this CPU computes in bfloat16, so base.dtype=bfloat16 may train faster" if computes_in_bfloat16() else ""


def crowded() -> str:
    """A line for a CPU whose cores other programs want, too, while torch has several threads; empty otherwise.

    The threads of an operation wait for the last of them, so one that has no core holds up all. With 10 processes on
    two cores a step of SmolLM2-135M took 4.4 s with one thread, and 6 to 64 s with two.
    """
    cores, load = os.cpu_count() or 1, psutil.getloadavg()[0]
    if torch.cuda.is_available() or torch.get_num_threads() == 1 or load < CROWDED * cores:
        return ""
    return (
        f"{load:.0f} processes want the {cores} cores, and threads wait for each other: OMP_NUM_THREADS=1 may be much "
        "faster"
    )
