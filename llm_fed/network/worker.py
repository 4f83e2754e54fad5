"""Worker: a process that keeps a machine's base model loaded between orders, behind a Unix socket.

Flower starts a process for every message and ends it with the reply. That one (`call`) only hands its orders over; the
worker, which it starts where there is none, lives on, also when its caller is killed. It ends with the SuperNode that
started it, so that none keeps a base in memory that nobody asks, or when no order has come for long. As it is nobody's
child for long, who starts it says which processes of Flower are above (SuperNode and SuperExec). This module imports
nothing heavy: what an order needs is imported when the first one comes.

    python -m llm_fed.network.worker HOME [--idle SECONDS] [--node PID,PID]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from llm_fed.basics.documents import load_json
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.files import open_unlinked
from llm_fed.basics.terminal import lasting_streams
from llm_fed.runs.lock import HeldError, Lock

if TYPE_CHECKING:
    from llm_fed.network.ledger import Answer
    from llm_fed.network.node import Node

IDLE = 3600.0  # seconds without an order after which a worker ends
LOOK = 1.0  # seconds between two looks at the node
_START = 60.0  # seconds within which a new worker must listen
_PATIENCE = 5.0  # seconds in which the work at hand may end in order, and delete its temporary files
_FLOWER = ("flower-", "flwr")  # how the names of its commands and of its modules begin


def call(home: Path, order: dict[str, Any], content: bytes, idle: float = IDLE) -> Answer:
    """The worker's reply to an order, and its content; starts the worker of `home` where there is none. RunError: it
    does not start, or ends before it replies. UserError: somebody else owns the folder of its socket."""
    with _connect(home, idle, node_of_this_process()) as connection:
        try:
            connection.send_bytes(json.dumps(order).encode())
            connection.send_bytes(content)
            return load_json(connection.recv_bytes()), connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise RunError(f"the worker of {home} ended while it worked; see {home / 'worker.log'}") from error


def serve(home: Path, idle: float = IDLE, node: Sequence[int] = (), answering: Node | None = None) -> bool:
    """Answer orders one after another, until none has come for `idle` seconds or the node has ended; returns False at
    once where another worker serves this home. `node`: the processes of the node that starts it. `answering`: None: one
    is made for the first order."""
    lock = Lock(home, "worker.lock")
    try:
        lock.acquire(lambda text: print(text, flush=True))
    except HeldError:
        return False
    path = address(home)
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise UserError(f"{path} is not a socket, but a worker's socket belongs there; move it away")
    path.unlink(missing_ok=True)  # what an earlier worker has left
    with socket.socket(socket.AF_UNIX) as listener:
        mask = os.umask(0o177)  # the socket is its owner's alone from the moment it exists
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        listener.listen()
        try:
            with ending_with(node):
                _serve(listener, idle, answering)
        finally:
            path.unlink(missing_ok=True)
            lock.release()
    return True


def _serve(listener: socket.socket, idle: float, node: Node | None) -> None:
    """Answer what comes, until nothing has come for `idle` seconds."""
    listener.settimeout(idle)
    while True:
        try:
            accepted, _ = listener.accept()
        except TimeoutError:
            print(f"no order for {idle:g} s", flush=True)
            return
        with Connection(accepted.detach()) as connection:
            try:
                order, content = load_json(connection.recv_bytes()), connection.recv_bytes()
                node = node or _node()
                reply, answer = _answer(node, order, content)
                connection.send_bytes(json.dumps(reply).encode())
                connection.send_bytes(answer)
            except (EOFError, OSError, ValueError) as error:
                print(f"a caller went away: {error!r}", flush=True)  # it will ask again


def address(home: Path) -> Path:
    """Where the socket of this home's worker lies: in a folder of the user's own, under a short name, since a socket's
    path may have no more than about 100 characters. UserError: the folder is another user's, or no folder."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or Path(tempfile.gettempdir()) / f"llm_fed-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {folder}, where a worker's socket lies: {error.strerror}") from error
    # A link of this name in a folder for all could lead into another folder of the same user, so it is not followed;
    # where XDG_RUNTIME_DIR leads is the user's own choice.
    status = folder.stat() if os.environ.get("XDG_RUNTIME_DIR") else folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise UserError(f"{folder} must be yours and closed to others (mode 700): a worker's socket lies there")
    return folder / f"llm_fed-{hashlib.sha256(str(home.resolve()).encode()).hexdigest()[:16]}.sock"


def _node() -> Node:
    from llm_fed.experiment import run
    from llm_fed.network.node import Node

    run.quiet()
    return Node()


def _answer(node: Node, order: dict[str, Any], content: bytes) -> Answer:
    from llm_fed.network.node import NodeSettings

    location = dict(order["place"])
    clients, allow = (tuple(location.pop(key, ())) for key in ("clients", "allow"))
    here = NodeSettings(Path(location.pop("home")), clients=clients, allow=allow, **location)
    return node.answer(here, order["config"], order["order"], content)


def _connect(home: Path, idle: float, node: Sequence[int]) -> Connection:
    path, started, until = address(home), None, time.monotonic() + _START
    while True:
        with suppress(OSError):
            return Client(str(path), "AF_UNIX")
        if started is None or started.poll() == 0:  # 0: it found another one, which has just ended
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(open_unlinked(home / "worker.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
                command = [sys.executable, "-m", "llm_fed.network.worker", str(home), "--idle", str(idle)]
                command += ["--node", ",".join(map(str, node))]
                started = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
        if started.poll() or time.monotonic() > until:
            raise RunError(f"the worker of {home} does not start; see {home / 'worker.log'}")
        time.sleep(0.05)


def node_of_this_process() -> list[int]:
    """The ids of the processes of Flower above this one; its own id where there is none."""
    try:
        return [each.pid for each in psutil.Process().parents() if _is_of_flower(each)] or [os.getpid()]
    except psutil.Error:  # one of them has just ended
        return [os.getpid()]


def _is_of_flower(process: psutil.Process) -> bool:
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
    stop = threading.Event()

    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            seen = [psutil.Process(id) for id in node]
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


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; one that was killed stays as a zombie until its parent looks."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path)
    parser.add_argument("--idle", type=float, default=IDLE)
    parser.add_argument("--node", type=lambda text: [int(word) for word in text.split(",")], default=[])
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that nothing is left behind
    try:
        with lasting_streams():  # a full disk of its log is no reason to end
            serve(arguments.home, arguments.idle, arguments.node)
    except SystemExit:
        os._exit(0)  # taking torch apart lasts seconds, for which the base would stay in memory


if __name__ == "__main__":
    main()
