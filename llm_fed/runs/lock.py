"""One process at a time writes to a folder, on any disk.

Where the disk has locks, `flock` keeps others out and ends with its process. Disks of clusters may have none (NFS
without its lock service, Lustre mounted without `flock`), or locks that hold on one machine alone, or that every
process gets. So the process also leaves a record of itself in the folder, `.lock.1`, whose name only one can make. A
record of a process that no longer runs is superseded by the next one, `.lock.2`. Of a process of another machine one
cannot know whether it runs; therefore whoever writes to such a disk renews its record every few seconds, and a record
that stays as it is for half a minute is that of a dead process.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from llm_fed.basics import mounts
from llm_fed.basics.errors import RunError
from llm_fed.basics.files import open_unlinked, read_file
from llm_fed.runs.holder import Holder

NAME = ".lock"
_BEAT = 5.0  # seconds between two renewals of a record
_PATIENCE = 30.0  # seconds after which a record of another machine that has not been renewed counts as left behind
_BUSY = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
# File systems of one machine, whose locks can be believed.
_OWN_DISKS = {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "overlay", "ramfs", "reiserfs",
              "tmpfs", "xfs", "zfs"}  # fmt: skip

_held: set[Path] = set()  # the locks of this process, which a disk without locks would give it twice
_held_changes = threading.Lock()


class HeldError(Exception):
    """Somebody else has the lock; the text says who, as the subject of a sentence."""


class Lock:
    """The lock of a folder, which must exist.

    Attributes:
        left: who had it last and never gave it back, until `forget_left`.
    """

    left: Holder | None = None

    def __init__(self, folder: Path, name: str = NAME):
        self._folder, self._name = folder.resolve(), name
        self._file: int | None = None  # with the flock
        self._record: Path | None = None
        self._inode = 0  # of the record
        self._dead: list[Path] = []  # records of processes that have ended
        self._stop: threading.Event | None = None  # of the thread that renews the record

    def acquire(self, note: Callable[[str], None]) -> None:
        """Take the lock, or refuse at once where somebody has it.

        Args:
            note: is told why it takes a while, and what can be done about it.

        Raises:
            HeldError: somebody else has it.
            OSError: the folder cannot be written.
        """
        path = self._folder / self._name
        with _held_changes:
            if path in _held:
                raise HeldError("another thread of this process")
            _held.add(path)
        try:
            flocked = self._flock(path)
            trusted = flocked and _is_own_disk(self._folder)
            self._claim(trusted, note)
            if not trusted:
                self._stop = threading.Event()
                threading.Thread(target=self._renew, args=[self._stop], name="lock", daemon=True).start()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None
        if self._record is not None and self._is_mine():
            with suppress(OSError):
                self._record.unlink()
        self._record = None
        if self._file is not None:
            with suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_UN)  # a process that was forked meanwhile holds the file open, too
            os.close(self._file)
            self._file = None
        with _held_changes:
            _held.discard(self._folder / self._name)

    def check(self) -> None:
        """Refuse to go on where another process has taken this one for dead.

        Raises:
            RunError: it has.
        """
        if self._stop is not None and not self._is_mine():
            raise RunError(
                f"another process has taken {self._folder} over, as {self._record} was not renewed for "
                f"{_PATIENCE:.0f} s; this one ends here"
            )

    def forget_left(self) -> None:
        """Delete what processes that have ended left of their locks."""
        for path in self._dead:
            path.unlink(missing_ok=True)
        self._dead, self.left = [], None

    def _flock(self, path: Path) -> bool:
        """Whether the disk has given its lock; else it has none.

        Raises:
            HeldError: another process has it.
        """
        file = open_unlinked(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in _BUSY:
                names = [f" ({holder})" for _, holder in self._records() if holder is not None]
                raise HeldError(f"another process{names[-1] if names else ''}") from error
            return False
        self._file = file
        return True

    def _claim(self, trusted: bool, note: Callable[[str], None]) -> None:
        """Leave a record where every other one is of a process that has ended."""
        while True:
            records = self._records()
            for path, holder in records:
                self._check_ended(path, holder, trusted, note)
            last = max(self._paths(), key=_number, default=None)  # a link to nothing has a name, too
            own = self._folder / f"{self._name}.{1 + (_number(last) if last else 0)}"
            if not _number(own):
                raise HeldError(f"whoever made {last}, the last possible record (if nobody writes here, delete it),")
            if self._make(own):
                break
        others = [(path, holder) for path, holder in self._records() if path != self._record]
        for path, holder in others:
            if (path, holder) not in records:  # made at the same time, from a view of long ago
                self._check_ended(path, holder, trusted, note)
        self._dead = [path for path, _ in others]
        self.left = next((holder for _, holder in reversed(others) if holder is not None), None)

    def _check_ended(self, path: Path, holder: Holder | None, trusted: bool, note: Callable[[str], None]) -> None:
        """Return where the process of a record has ended.

        Raises:
            HeldError: it has not.
        """
        if holder is not None and holder.is_here:
            if holder.runs and not holder.is_me:  # of this process, which does not hold the lock, it is a leftover
                raise HeldError(f"another process ({holder})")
        elif not trusted and self._is_renewed(path, holder, note):
            raise HeldError(f"another process ({f'{holder}; ' if holder else ''}it renews {path})")

    def _is_renewed(self, path: Path, holder: Holder | None, note: Callable[[str], None]) -> bool:
        """Whether a record changes while one watches it."""
        before, until = _state(path), time.monotonic() + _PATIENCE
        if before is None:
            return False
        who = f"process {holder}" if holder else "a process"
        note(
            f"{path} says that {who} writes here; waiting up to {_PATIENCE:.0f} s to see whether that still runs (if "
            "you know that it does not, delete the file)"
        )
        while time.monotonic() < until:
            time.sleep(min(0.5, _PATIENCE / 10))
            if (now := _state(path)) != before:
                return now is not None
        return False

    def _make(self, path: Path) -> bool:
        """Make this process's record, whole from the moment it exists; whether nobody else has made it before."""
        draft = self._folder / f"{self._name}.{secrets.token_hex(4)}.partial"
        data = Holder.me().as_json()
        try:
            with open(draft, "xb") as stream:
                stream.write(data)
            try:
                os.link(draft, path)
            except FileExistsError:
                return False
            except OSError:  # a disk without links; the record is empty for a moment
                file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                with open(file, "wb", buffering=0) as stream:
                    stream.write(data)
        except FileExistsError:
            return False
        finally:
            draft.unlink(missing_ok=True)
        self._record, self._inode = path, path.stat().st_ino
        return True

    def _renew(self, stop: threading.Event) -> None:
        path = self._record
        while path is not None and not stop.wait(_BEAT):
            with suppress(OSError):  # `check` notices where it is gone
                os.utime(path)

    def _is_mine(self) -> bool:
        """Whether the newest record is this process's."""
        try:
            newest = max(self._paths(), key=_number, default=None)
            return newest == self._record and newest is not None and newest.stat().st_ino == self._inode
        except OSError:
            return False

    def _records(self) -> list[tuple[Path, Holder | None]]:
        """Every record, the newest last."""
        records = []
        for path in sorted(self._paths(), key=_number):
            with suppress(FileNotFoundError):
                records.append((path, Holder.read(path)))
        return records

    def _paths(self) -> list[Path]:
        return [path for path in self._folder.glob(f"{self._name}.*") if _number(path)]


def _number(path: Path) -> int:
    """Of a record; 0 where it is none."""
    digits = path.suffix[1:]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0


def _state(path: Path) -> tuple[int, bytes] | None:
    """What changes when a record is renewed or replaced; None where it is gone. It is opened, as NFS then asks anew."""
    try:
        content = read_file(path)
        return path.stat().st_mtime_ns, content
    except FileNotFoundError:
        return None


def _is_own_disk(folder: Path) -> bool:
    """Whether a folder lies on a disk of this machine alone, as far as the system tells."""
    mount = mounts.holding(folder)
    return mount is None or mount.kind in _OWN_DISKS
