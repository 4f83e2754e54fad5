"""Whether this CPU computes in bfloat16, by its flags."""

from __future__ import annotations

import re
from pathlib import Path

CPU = Path("/proc/cpuinfo")


def computes_in_bfloat16() -> bool | None:
    """Whether this CPU has instructions for bfloat16, by its flags (avx512_bf16, amx_bf16; of ARM bf16); None where the
    system does not say."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", CPU.read_text(), re.MULTILINE) if CPU.is_file() else None
    return None if flags is None else any(flag.endswith("bf16") for flag in flags[1].split())


def hint() -> str:
    """A line for a CPU that computes in bfloat16; empty for another one."""
    return "this CPU computes in bfloat16, so base.dtype=bfloat16 may train faster" if computes_in_bfloat16() else ""
