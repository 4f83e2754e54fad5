"""What the kernel grants this process of the machine's memory: control groups of version 1 and 2, from its own up to
the root, and resource limits.

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

# By version of control groups: the files with a limit, the usage, and the line of memory.stat with the page cache that
# the kernel can take back at once.
_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
# Where the groups usually lie, in case /proc/self/mountinfo does not say so.
_USUAL = {1: ("/sys/fs/cgroup/memory",), 2: ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")}
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
    return min([*group_limits(root), *resource_limits(root), *_own_share()], key=lambda limit: limit.free, default=None)


def group_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """The limits of all control groups that this process is in."""
    limits = []
    for version, name, folder in groups(root):
        files, usage_file, cache = _FILES[version]
        statistics = _table(folder / "memory.stat")
        used = max(0, (_number(folder / usage_file) or 0) - statistics.get(cache, 0))
        sizes = {file: _number(folder / file) for file in files}
        sizes["hierarchical_memory_limit"] = statistics.get("hierarchical_memory_limit")  # also of groups out of sight
        for file, size in sizes.items():
            if size is not None and size < _UNLIMITED:
                limits.append(MemoryLimit(f"{file} of the control group {name}", size, max(0, size - used)))
    return limits


def resource_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Those that a shell's `ulimit -v` and `ulimit -d` set, and some schedulers."""
    status = _table(root / "proc/self/status")
    limits = []
    for name, which, used in (
        ("address space (ulimit -v)", resource.RLIMIT_AS, "VmSize:"),
        ("data (ulimit -d)", resource.RLIMIT_DATA, "VmData:"),
    ):
        size, _ = resource.getrlimit(which)
        if size != resource.RLIM_INFINITY:
            limits.append(MemoryLimit(f"the limit on {name}", size, max(0, size - 1024 * status.get(used, 0))))
    return limits


def _own_share() -> list[MemoryLimit]:
    size = os.environ.get(SHARE, "")
    if not (size.isascii() and size.isdigit()):
        return []
    left = int(size) - psutil.Process().memory_info().rss
    return [MemoryLimit("the share of one of several processes", int(size), max(0, left))]


def groups(root: Path = Path("/")) -> Iterator[tuple[int, str, Path]]:
    """(version, name, folder) of each group that limits memory and holds this process: its own first, the root last. In
    a container the process's path may be that of the host, while only a part of the tree is mounted. So folders that do
    not exist are passed over, and the root of what is mounted always counts."""
    seen: set[Path] = set()
    for version, path in _paths(root):
        for location, part in [*_places(root, version), *((usual, "/") for usual in _USUAL[version])]:
            within = Path(path).is_relative_to(part)
            own = Path(path).relative_to(part if within else "/")
            for group in [own, *own.parents]:
                folder = root / location.strip("/") / group
                if folder not in seen and any((folder / name).exists() for name in _FILES[version][0]):
                    seen.add(folder)
                    yield version, f"/{group}" if group.parts else "/", folder


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


def _places(root: Path, version: int) -> Iterator[tuple[str, str]]:
    """Where a hierarchy of control groups is mounted, and which part of it."""
    for mount in mounts(root):
        if mount.kind == ("cgroup2" if version == 2 else "cgroup") and (version == 2 or "memory" in mount.options):
            yield mount.location, mount.part


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    """The lines `name number ...` of a file."""
    words = (line.split() for line in _text(path).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isascii() and line[1].isdigit()}


def _text(path: Path) -> str:
    """What a file of the kernel's holds; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Mount:
    """A file system, or a part of one, and where it is mounted."""

    part: str
    location: str
    kind: str
    options: str


def mounts(root: Path = Path("/")) -> Iterator[Mount]:
    """All of them in the order in which they were mounted, so that a later one hides an earlier one at its place.
    `root` is that of the file system, so that tests can lay out /proc as it is elsewhere."""
    try:
        lines = (root / "proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(" "), after.split(" ")
        if len(fields) >= 5 and len(kinds) >= 3:
            yield Mount(_unescaped(fields[3]), _unescaped(fields[4]), kinds[0], kinds[2])


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)
