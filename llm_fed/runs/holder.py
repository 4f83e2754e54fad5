"""Who writes to a folder: a process of a machine, whether it is still alive, and how it seems to have ended if not."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

import psutil

from llm_fed.basics import cgroups
from llm_fed.basics.documents import load_json
from llm_fed.basics.files import read_file

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Attributes:
        host: the machine's name.
        system: of the numbers of processes: the boot of a machine and a namespace on it. Two processes of one system
            can look for each other.
        pid, start: the process's number, and when it was started, in units of its system.
        began: when it took the lock, in UTC.
        kills: how many processes the kernel had killed for want of memory until then, see `cgroups.kills`.
    """

    host: str
    system: str
    pid: int
    start: int
    began: str
    kills: Mapping[str, int]

    @classmethod
    def me(cls) -> Holder:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        pid = os.getpid()
        return cls(socket.gethostname(), _system(), pid, _start(pid) or 0, now, cgroups.kills())

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """What a file says; None where it is damaged, or not yet written.

        Raises:
            FileNotFoundError: there is no such file.
        """
        try:
            values = load_json(read_file(path))
            holder = cls(**{field.name: values[field.name] for field in fields(cls)})
            types = (str, str, int, int, str, dict)
            return holder if all(map(isinstance, asdict(holder).values(), types)) else None
        except FileNotFoundError:
            raise
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def as_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @property
    def is_here(self) -> bool:
        """Whether it was started on this machine since its last boot, among the processes that this one sees."""
        return self.system == _system() and (self.system != "" or self.host == socket.gethostname())

    @property
    def is_me(self) -> bool:
        return self.is_here and self.pid == os.getpid() and self.start == _start(self.pid)

    @property
    def runs(self) -> bool:
        """Whether it is alive, where it `is_here`."""
        try:
            os.kill(self.pid, 0)
        except PermissionError:  # it is another user's, of whom /proc may say nothing
            return True
        except (OSError, OverflowError):
            return False
        return _start(self.pid) == self.start

    def __str__(self) -> str:
        return f"{self.pid} on {self.host}, since {self.began}"

    def end(self) -> str:
        """How it seems to have ended, in a sentence, where it did not say so itself."""
        said = f"the last command here (process {self}) ended without a word"
        if self.system.partition("/")[0] != _system().partition("/")[0]:
            return f"{said}: it was killed, or its machine stopped"
        now = cgroups.kills()
        more = {name: count - self.kills.get(name, count) for name, count in now.items()}
        groups = [name for name, count in more.items() if count > 0 and name != "machine"]
        if groups:
            limits = {limit.name: limit.size for limit in cgroups.group_limits()}
            said = f"{said}: the kernel has killed a process of the control group {groups[0]} for want of memory since"
            sizes = [f"{size / 2**30:.2f} GiB" for name, size in limits.items() if name.endswith(f" {groups[0]}")]
            return f"{said} (its limit is {sizes[0]})" if sizes else said
        if more.get("machine", 0) > 0:
            return f"{said}: the kernel has killed a process of this machine for want of memory since"
        return f"{said}: it was killed"


def _system() -> str:
    """Empty where the system does not tell."""
    try:
        return f"{_BOOT.read_text().strip()}/{_NAMESPACE.stat().st_ino}"
    except OSError:
        return ""


def _start(pid: int) -> int | None:
    """When a process was started; None where there is none, or only its remains."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return None if text[0] in "ZX" else int(text[19])
    except (OSError, IndexError, ValueError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        return int(psutil.Process(pid).create_time())
    except psutil.Error:
        return None
