"""Lifetime: a worker ends with the SuperNode that started it, so that none keeps a base in memory that nobody asks.

The process that asks a worker ends with its message, and the worker is nobody's child for long. So who starts it says
which processes of Flower are above (SuperNode and SuperExec), and the worker looks whether they still run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

LOOK = 1.0  # seconds between two looks at the node
_PATIENCE = 5.0  # seconds in which the work at hand may end in order, and delete its temporary files
_FLOWER = ("flower-", "flwr")  # how the names of its commands and of its modules begin


def node_of_this_process() -> list[int]:
    """The ids of the processes of Flower that this one was started by, whichever wrappers lie between; its own id where
    it is none of Flower's."""
    try:
        return [each.pid for each in psutil.Process().parents() if _is_flowers(each)] or [os.getpid()]
    except psutil.Error:  # one of them has just ended
        return [os.getpid()]


def _is_flowers(process: psutil.Process) -> bool:
    """Of a script's command line Python is the first word, and `-m` may be the second."""
    try:
        program, *words = process.cmdline() or [""]
    except psutil.Error:  # another user's, or it has just ended
        return False
    words = words[:2] if Path(program).name.startswith("python") else [program]
    return any(Path(word).name.startswith(_FLOWER) for word in words)


@contextmanager
def ending_with(node: Sequence[int]) -> Iterator[None]:
    """Within, SIGTERM comes when one of these processes has ended, whatever the main thread does; if that does not end,
    it is made to. None is mistaken for a later process with the same id; without any, nothing comes."""
    stop, seen = threading.Event(), [_process(id) for id in node]

    def watch() -> None:
        while all(map(runs, seen)):
            if stop.wait(LOOK):
                return
        print("its node has ended, and so does this worker", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        if not stop.wait(_PATIENCE):
            os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def _process(id: int) -> psutil.Process | None:
    try:
        return psutil.Process(id)
    except psutil.NoSuchProcess:
        return None


def runs(process: psutil.Process | None) -> bool:
    """A process that was killed stays as a zombie until its parent looks."""
    try:
        return process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
