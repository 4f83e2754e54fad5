"""Processes of this machine that carry out orders one after another, each with an interpreter of its own.

They are started anew and never forked, as torch may hang in a fork once it has computed. Orders and replies are bytes
in a pair of sockets. These close when the process that gives orders ends, however it ends; its processes notice that
and end, too. Ctrl-C reaches only the process that gives orders, which then ends the others.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any, NoReturn

from llm_fed.basics.errors import RunError

# Not `-m`, which would look for all modules in the current folder first.
_START = "import sys; module, number, *sys.path = sys.argv[1:]; __import__(module, fromlist=['main']).main(int(number))"
_GRACE = 5.0  # seconds in which a process may leave what it does; then it ends in the midst of it
_LINE = 2**16  # bytes of a line, after which it counts as one

Say = Callable[[str, str], None]  # is given the name of what a process does, and a line that it printed


class ChildProcess:
    """A process that waits for orders.

    Args:
        module: where its `main` is found, which calls `serve` with the number that it is given.
        environment: variables that it gets beside those of this process.

    Attributes:
        name: of what it does now.

    Raises:
        RunError: the system allows no further process.
    """

    name = ""

    def __init__(self, module: str, environment: Mapping[str, str]):
        self.pipe, theirs = Pipe()
        try:
            with theirs, _deaf():
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, module, str(theirs.fileno()), *sys.path],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                    pass_fds=[theirs.fileno()], env={**os.environ, **environment},
                )  # fmt: skip
        except OSError as error:
            raise RunError(f"cannot start a process: {error.strerror or error}; fewer at once may do") from error
        assert self._process.stdout is not None
        self.output: Any = self._process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._begun = b""  # of a line

    def order(self, name: str, data: bytes) -> None:
        """Give it something to do, once it has replied to the last order; where it has ended, `reply` says so."""
        self.name = name
        with suppress(OSError):
            self.pipe.send_bytes(data)

    def reply(self) -> bytes | None:
        """What it has replied, once it has; None where it has ended."""
        try:
            return self.pipe.recv_bytes()
        except (EOFError, OSError):
            return None

    def say_all(self, say: Say) -> None:
        """Hand on all lines that it has printed by now."""
        while self.output is not None:
            try:
                data = self.output.read(_LINE)
            except OSError:
                data = b""
            if data is None:  # no more for now
                return
            *lines, self._begun = (self._begun + data).split(b"\n")
            if not data or len(self._begun) > _LINE:
                lines, self._begun = [*lines, self._begun], b""
            if not data:
                self.output.close()
                self.output = None
            for line in lines:
                text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")  # a bar that moves: its end
                if text.strip():
                    say(self.name, text)

    def ask_to_end(self) -> None:
        self.pipe.close()
        self._process.terminate()

    def end(self) -> int:
        """Its exit code, negative for a signal, once it has ended by itself; it is killed after the grace."""
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_GRACE)
        return self.kill()

    def kill(self) -> int:
        self._process.kill()
        return self._process.wait()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None


def next_reply(workers: Sequence[ChildProcess], say: Say) -> ChildProcess:
    """Wait for the first process that has replied or ended; meanwhile, and before, what all of them print is said."""
    while True:
        ready = wait([source for each in workers for source in (each.pipe, each.output) if source is not None])
        for each in workers:
            if each.output in ready or each.pipe in ready:
                each.say_all(say)
            if each.pipe in ready:
                return each


def end_all(workers: Sequence[ChildProcess], say: Say) -> None:
    """Let all leave what they do, which the next command continues; after the grace, or at a second Ctrl-C, kill
    them."""
    for each in workers:
        each.ask_to_end()
    until = time.monotonic() + _GRACE + 1
    try:
        while any(each.runs for each in workers) and time.monotonic() < until:
            for each in workers:
                each.say_all(say)
            time.sleep(0.05)
    finally:
        for each in workers:
            each.kill()


def serve(number: int, answer: Callable[[bytes], bytes]) -> NoReturn:
    """In a process that a `ChildProcess` stands for: answer orders until nobody gives any more.

    Args:
        number: that `main` was given.
    """
    pipe, orders = Connection(number), queue.SimpleQueue[bytes | None]()
    signal.signal(signal.SIGTERM, _terminated)
    threading.Thread(target=_receive, args=[pipe, orders], name="orders", daemon=True).start()
    code = 0
    try:
        try:
            while (order := orders.get()) is not None:
                reply = answer(order)
                _flush()
                pipe.send_bytes(reply)
        except OSError:  # whoever gave the order has gone
            code = 1
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _flush()
    except KeyboardInterrupt:
        _flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(code)  # taking torch apart lasts seconds, for which a base would stay in memory


def _receive(pipe: Connection, orders: queue.SimpleQueue[bytes | None]) -> None:
    """Hand orders on, and end this process once the pipe closes: nobody would look after it."""
    with suppress(EOFError, OSError):
        while True:
            orders.put(pipe.recv_bytes())
    orders.put(None)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


def _terminated(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise KeyboardInterrupt


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are started within never hear of Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
