"""Locks of other packages: those of Hugging Face's libraries in their caches. Whoever waits for one says so."""

from __future__ import annotations

import errno
import logging
import sys
import threading
import time

_SOON = 1.5  # seconds after which a wait is named
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class _Waits(logging.Filter):
    """Looks at what the package filelock logs, and passes on what was passed on before."""

    def __init__(self, level: int):
        super().__init__()
        self._level = level
        self._since: dict[tuple[int, str], float] = {}  # by thread and file
        self._named: set[tuple[int, str]] = set()
        self.last = ""  # the file of the last attempt

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) > 1 and isinstance(record.msg, str):
            key = threading.get_ident(), str(record.args[1])
            if key[1].endswith(".lease"):  # our own, whose holder is named
                return False
            self.last = key[1]
            if " not acquired" in record.msg:
                self._wait(key)
            elif " acquired" in record.msg:
                self._since.pop(key, None)
                self._named.discard(key)
        return record.levelno >= self._level

    def _wait(self, key: tuple[int, str]) -> None:
        since = self._since.setdefault(key, time.monotonic())
        if time.monotonic() - since > _SOON and key not in self._named:
            self._named.add(key)
            print(
                f"llm-fed: waiting for the lock {key[1]}, which another process holds (or its disk has no locks;"
                " HF_HOME names another folder for such files)",
                file=sys.stderr,
                flush=True,
            )


def name_them() -> None:
    logger = logging.getLogger("filelock")
    if not any(isinstance(filter, _Waits) for filter in logger.filters):
        logger.addFilter(_Waits(logger.getEffectiveLevel()))
        logger.setLevel(logging.DEBUG)


def no_locks(error: BaseException | None) -> str:
    """Why an error came about, and what to do, where the disk of a cache has no locks; else empty."""
    while error is not None:
        if isinstance(error, NotImplementedError) and "flock" in str(error):
            break  # what filelock raised before version 3.30 where there are none
        if isinstance(error, OSError) and error.errno in _NO_LOCKS:
            break
        error = error.__cause__ or error.__context__
    else:
        return ""
    files = [
        filter.last for filter in logging.getLogger("filelock").filters if isinstance(filter, _Waits) and filter.last
    ]
    return (
        f"the disk of {files[0] if files else 'the cache'} has no locks, which the libraries of Hugging Face need "
        "there; set HF_HOME to a folder on another disk"
    )
