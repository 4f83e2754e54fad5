"""One process at a time writes to a folder: a lock of the package filelock, and where the disk has no locks (as NFS
without its lock service) its lease, which its holder renews and others take over once it is no longer renewed.

Who holds it stands beside it, for messages.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from llm_fed.basics import launchers
from llm_fed.basics.errors import RunError, one_line
from llm_fed.basics.files import read_file, write_file
from llm_fed.runs.records import time_of_day

NAME = ".lock"
_LOOK, _LOOKS = 0.1, 50  # seconds between two looks who holds a lock, and how many
_BEAT = 5.0  # seconds between two renewals of a lease
_PATIENCE = 30.0  # seconds after which a lease of another machine that has not been renewed is taken over


class HeldError(RunError):
    """Somebody else has the lock; who."""


class Lock:
    """The lock of a folder, which must exist."""

    def __init__(self, folder: Path, name: str = NAME):
        path = folder.resolve() / name
        self._path, self._holder = path, path.with_name(f"{name}.holder")
        self._lock: BaseFileLock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False)

    def acquire(self, note: Callable[[str], None]) -> None:
        """Take the lock, or refuse at once where somebody has it. HeldError: somebody else has it. OSError: the folder
        cannot be written. `note`: is told why it takes a while, and what can be done about it."""
        try:
            try:
                self._lock.acquire()
            except OSError as error:
                forbidden = self._path.is_symlink() or (self._path.exists() and not os.access(self._path, os.W_OK))
                if isinstance(error, Timeout) or forbidden:
                    raise
                self._lease(note)
        except Timeout as error:
            holder = self._first_read()
            here = holder.startswith(f"{os.getpid()} on {socket.gethostname()},")
            who = "thread of this process" if here else f"process ({holder})" if holder else "process"
            said = f"another {who} is writing to {self._path.parent}; wait for its end, or name another folder"
            raise HeldError(said + launchers.copy_of()) from error
        try:
            if left := self._read():
                last = f"the last command in {self._path.parent} (process {left}) ended without a word"
                note(f"{last}: it was killed (by the kernel, where memory ran out), or its machine stopped")
            write_file(self._holder, f"{os.getpid()} on {socket.gethostname()}, since {time_of_day()}".encode())
        except BaseException:
            self.release()
            raise

    def _lease(self, note: Callable[[str], None]) -> None:
        lease = self._path.with_name(f"{self._path.name}.lease")
        self._lock = SoftFileLease(
            lease, timeout=0, thread_local=False, lease_duration=_PATIENCE, heartbeat_interval=_BEAT
        )
        try:
            self._lock.acquire()
        except Timeout:
            if f" on {socket.gethostname()}, " in (holder := self._read()):
                raise  # filelock takes over what a dead process of this machine has left
            note(
                f"{lease} says that process {holder or '?'} writes here; waiting up to {_PATIENCE:.0f} s to see whether"
                " that still runs (if you know that it does not, delete the file)"
            )
            self._lock.acquire(timeout=_PATIENCE + _BEAT)

    def release(self) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                self._holder.unlink()
            with suppress(OSError):
                self._lock.release()

    def check(self) -> None:
        """Refuse to go on where another process has taken this one for dead; RunError says so."""
        if isinstance(self._lock, SoftFileLease) and (loss := self._lock.compromise):
            raise RunError(
                f"another process has taken {self._path.parent} over, as {loss.lock_file} was not renewed for "
                f"{_PATIENCE:.0f} s; this one ends here"
            )

    def _first_read(self) -> str:
        """Who has only just taken the lock writes his name a moment later, and on a slow disk seconds later."""
        for _ in range(_LOOKS):
            if holder := self._read():
                return holder
            time.sleep(_LOOK)
        return ""

    def _read(self) -> str:
        """`PID on HOST, since TIME`; empty where nobody has left it."""
        try:
            return one_line(read_file(self._holder).decode(errors="replace"))
        except OSError:
            return ""
