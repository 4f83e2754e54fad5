"""Lifetime: a worker ends with the SuperNodes that it serves, so that none keeps a base in memory that nobody asks.

The process that asks a worker ends with its message, and the worker is nobody's child for long. So each caller says
which processes of Flower are above it (SuperNode and SuperExec), and the worker looks whether they still run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

LOOK = 1.0  # seconds between two looks at the nodes
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


class Nodes:
    """The nodes that a worker serves, each by its processes. A node runs as long as all of its processes do; none is
    mistaken for a later one with the same id.

    Args:
        first: the ids of the processes of the node that started the worker; without any, nothing ends it until a node
            is added.
    """

    def __init__(self, first: Sequence[int] = ()):
        self._nodes: set[tuple[psutil.Process, ...]] = set()
        self._lock = threading.Lock()
        self._bound = False  # to the life of any node
        if first:
            self.add(first)

    def add(self, ids: Sequence[int]) -> None:
        """Serve this node, too; one that has just ended is none."""
        if not ids:
            return
        with self._lock:
            self._bound = True
            try:
                self._nodes.add(tuple(psutil.Process(id) for id in ids))
            except psutil.NoSuchProcess:
                return

    @property
    def ended(self) -> bool:
        """Whether there were nodes, and none of them runs any more."""
        with self._lock:
            self._nodes = {node for node in self._nodes if all(map(_runs, node))}
            return self._bound and not self._nodes

    @contextmanager
    def end_this_process(self) -> Iterator[None]:
        """Within, SIGTERM comes when all nodes have ended, whatever the main thread does; if it does not end, it is
        made to."""
        stop = threading.Event()

        def watch() -> None:
            while not self.ended:
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


def _runs(process: psutil.Process) -> bool:
    """A process that was killed stays as a zombie until its parent looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
