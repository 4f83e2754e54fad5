"""What the kernel grants this process of the machine's memory: control groups of version 1 and 2, from its own up to
the root, and `ulimit -v`.

Containers, SLURM jobs and systemd units are control groups. A process that exceeds the limit of any group on its path
is killed by the kernel without a message, however much memory the machine has.

Every function takes the root of the file system, so that tests can lay out /proc and /sys as they are elsewhere.
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# By version of control groups: where they lie, the files with a limit, the usage, and the line of memory.stat with the
# page cache that the kernel can take back at once.
_FILES = {
    1: ("sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: ("sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
SHARE = "LLM_FED_MEMORY"  # the variable with the bytes that this process may take, where several divide the memory
_UNLIMITED = 2**60  # version 1 writes a number near 2**63 where there is no limit


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on this process's memory."""

    name: str  # of what it is, for messages
    size: int  # bytes that it allows
    free: int  # bytes that are left of them; page cache that can be taken back counts as free


def free_memory(root: Path = Path("/")) -> tuple[int, MemoryLimit | None]:
    """The bytes that this process may still take of the machine's memory, and the limit that allows no more; None where
    the machine itself has no more."""
    available, limit = psutil.virtual_memory().available, tightest(root)
    return (available, None) if limit is None or limit.free >= available else (limit.free, limit)


def free_for_all(root: Path = Path("/")) -> int:
    """The bytes that this process and others that it starts may still take together."""
    return min(psutil.virtual_memory().available, *(limit.free for limit in group_limits(root)), _UNLIMITED)


def tightest(root: Path = Path("/")) -> MemoryLimit | None:
    """The limit that leaves the fewest bytes; None where there is none."""
    limits, process = group_limits(root), psutil.Process()
    size, _ = resource.getrlimit(resource.RLIMIT_AS)
    if size != resource.RLIM_INFINITY:  # some schedulers set it
        left = max(0, size - process.memory_info().vms)
        limits.append(MemoryLimit("the limit on address space (ulimit -v)", size, left))
    share = os.environ.get(SHARE, "")
    if share.isascii() and share.isdigit():
        left = max(0, int(share) - process.memory_info().rss)
        limits.append(MemoryLimit("the share of one of several processes", int(share), left))
    return min(limits, key=lambda limit: limit.free, default=None)


def group_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of all control groups that this process is in."""
    limits = []
    for version, path in _paths(root):
        location, files, usage, cache = _FILES[version]
        # In a container the path may be that of the host. What is not there is passed over, and the root always counts.
        for group in (Path(path), *Path(path).parents):
            folder = root / location / group.relative_to("/")
            freeable = re.search(rf"^{cache} (\d+)", _text(folder / "memory.stat"), re.MULTILINE)
            used = max(0, int(_text(folder / usage) or 0) - int(freeable[1] if freeable else 0))
            for file in files:
                text = _text(folder / file).strip()  # version 2 writes "max" where there is no limit
                if text.isdecimal() and (size := int(text)) < _UNLIMITED:
                    limits.append(MemoryLimit(f"{file} of the control group {group}", size, max(0, size - used)))
    return limits


def _paths(root: Path) -> Iterator[tuple[int, str]]:
    """(version, path) of this process's control groups, as far as memory is concerned."""
    lines = _text(root / "proc/self/cgroup").splitlines()
    for line in lines or ("0::/", "1:memory:/"):  # without /proc, the roots of what is mounted
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if number == "0" and not controllers else 1
        if version == 2 or "memory" in controllers.split(","):
            # A path outside the process's own root ("/../..") cannot be looked at from here.
            yield version, path if path.startswith("/") and ".." not in path.split("/") else "/"


def _text(path: Path) -> str:
    """What a file of the kernel's holds; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
