"""The file systems of this machine, as far as Linux tells of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mount:
    """A file system, or a part of one, and where it is mounted."""

    part: str
    place: str
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


def holding(folder: Path, root: Path = Path("/")) -> Mount | None:
    """The file system that a folder lies on; None where the system does not tell."""
    folder = folder.resolve()
    above = [mount for mount in mounts(root) if folder.is_relative_to(mount.place)]
    return max(reversed(above), key=lambda mount: len(mount.place), default=None)  # of equal places the last


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)
