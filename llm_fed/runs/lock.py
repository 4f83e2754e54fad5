"""One process at a time writes to a folder: a lock of the package filelock, and where the disk has no locks (as NFS
without its lock service) its lease, which its holder renews and others take over once it is no longer renewed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLease, Timeout

from llm_fed.basics.errors import RunError

NAME = ".lock"
_BEAT = 5.0  # seconds between two renewals of a lease
_PATIENCE = 30.0  # seconds after which a lease of another machine that has not been renewed is taken over


class HeldError(RunError):
    """Somebody else has the lock; who."""


class Lock:
    """The lock of a folder, which must exist."""

    def __init__(self, folder: Path, name: str = NAME):
        self._path = folder.resolve() / name
        self._lock: BaseFileLock = FileLock(self._path, timeout=0, thread_local=False, fallback_to_soft=False)

    def acquire(self, note: Callable[[str], None]) -> None:
        """Take the lock, or refuse at once where somebody has it. HeldError: somebody else has it. OSError: the folder
        cannot be written. `note`: is told why it takes a while, and what can be done about it."""
        try:
            try:
                self._lock.acquire()
            except Timeout:
                raise
            except OSError:
                if self._path.is_symlink() or (self._path.exists() and not os.access(self._path, os.W_OK)):
                    raise
                self._lease(note)
        except Timeout as error:
            where = self._path.parent
            raise HeldError(
                f"another process or thread is writing to {where}; wait for its end, or name another"
            ) from error

    def _lease(self, note: Callable[[str], None]) -> None:
        file = self._path.with_name(f"{self._path.name}.lease")
        lease = self._lock = SoftFileLease(
            file, timeout=0, thread_local=False, lease_duration=_PATIENCE, heartbeat_interval=_BEAT
        )
        try:
            lease.acquire()
        except Timeout:
            if (owner := lease.owner) and owner.hostname == socket.gethostname():
                raise  # filelock takes over what a dead process of this machine has left
            who = f"process {owner.pid} on {owner.hostname}" if owner else "another process"
            note(
                f"{file} says that {who} writes here; waiting up to {_PATIENCE:.0f} s to see whether that still runs "
                "(if you know that it does not, delete the file)"
            )
            lease.acquire(timeout=_PATIENCE + _BEAT)

    def release(self) -> None:
        if self._lock.is_locked:
            with suppress(OSError):
                self._lock.release()

    def check(self) -> None:
        """Refuse to go on where another process has taken this one for dead; RunError says so."""
        if isinstance(self._lock, SoftFileLease) and (loss := self._lock.compromise):
            raise RunError(
                f"another process has taken {self._path.parent} over, as {loss.lock_file} was not renewed for "
                f"{_PATIENCE:.0f} s; this one ends here"
            )
