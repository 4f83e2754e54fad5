"""The lock of a folder on disks of every kind: processes that are killed at any operation, and that contend for it.

    PYTHONPATH=tests/support python tests/support/lock_faults.py kills
    PYTHONPATH=tests/support python tests/support/lock_faults.py races [--seconds 60] [--seed 0]

`kills` stops a process before each operation on a file while it takes the lock and gives it back. From what it leaves,
the next process must get the lock at once and be told that somebody ended without a word, if the record was there.
`races` lets several processes take the lock again and again, of which some are killed while they hold it: no two may
ever have it at once, and in the end it must be free.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from llm_fed.runs import lock
from llm_fed.runs.lock import HeldError, Lock

_OPERATIONS = ("open", "fcntl.", "os.link", "os.remove", "os.utime")
PROCESSES = 4


class Disk:
    """Locks and links as a kind of disk has them, from now on in this process and those that it forks.

    Args:
        kind: `good`; `ENOLCK`, `ENOSYS` and so on: what flock says; `generous`: every process gets each lock;
            `no-links`: neither locks nor links.
    """

    KINDS = ("good", "ENOLCK", "ENOSYS", "EOPNOTSUPP", "EIO", "generous", "no-links")

    def __init__(self, kind: str):
        self._kind, self._flock, self._link = kind, fcntl.flock, os.link

    def __enter__(self) -> Disk:
        if self._kind != "good":
            fcntl.flock = self._broken_flock  # type: ignore[assignment]
        if self._kind == "no-links":
            os.link = self._broken_link  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: object) -> None:
        fcntl.flock, os.link = self._flock, self._link

    def _broken_flock(self, file: int, operation: int) -> None:
        if self._kind != "generous":
            code = errno.ENOLCK if self._kind == "no-links" else getattr(errno, self._kind)
            raise OSError(code, os.strerror(code))

    def _broken_link(self, source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def in_child(job: Callable[[], None]) -> int:
    """The job in a process of its own; how that ended."""
    child = os.fork()
    if not child:
        code = 1
        try:
            job()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def take_and_give_back(folder: Path) -> None:
    own = Lock(folder)
    own.acquire(_silent)
    own.forget_left()
    own.release()


def killed_at(folder: Path, number: int) -> bool:
    """Whether a process that takes the lock and gives it back was killed before its operation of this number."""

    def job() -> None:
        left = number

        def look(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event.startswith(_OPERATIONS):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        take_and_give_back(folder)

    code = in_child(job)
    assert code in (0, -signal.SIGKILL), code
    return code != 0


def kills(kind: str) -> tuple[int, list[str]]:
    """How many places there are, and what was wrong after a kill at one of them."""
    number, wrong = 1, []
    with Disk(kind):
        while True:
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                if not killed_at(folder, number):
                    return number - 1, wrong
                records = [path for path in folder.glob(".lock.*") if path.suffix[1:].isdigit()]
                own, began = Lock(folder), time.monotonic()
                try:
                    own.acquire(_silent)
                except HeldError as error:
                    wrong.append(f"{kind}, operation {number}: held by {error}")
                    own = None
                if own is not None:
                    # A record that is still empty, where it cannot be made whole, is watched for a while.
                    if time.monotonic() - began > 1.0 + (kind == "no-links") * lock._PATIENCE:
                        wrong.append(f"{kind}, operation {number}: took {time.monotonic() - began:.1f} s")
                    if bool(records) != (own.left is not None) and kind != "no-links":
                        wrong.append(f"{kind}, operation {number}: left {own.left}, records {records}")
                    own.forget_left()
                    own.release()
                    if left := sorted(path.name for path in folder.glob(".lock.[0-9]")):
                        wrong.append(f"{kind}, operation {number}: {left} stay")
            number += 1


def race(folder: Path, seed: int, until: float) -> None:
    """One of the processes that contend: takes the lock, stays a moment, and gives it back or dies."""
    rng, inside = random.Random(seed), folder / "inside"
    while time.monotonic() < until:
        own = Lock(folder)
        try:
            own.acquire(_silent)
        except HeldError:
            time.sleep(rng.uniform(0, 0.004))
            continue
        if inside.exists() and not own.left:
            _found(folder, f"{os.getpid()} came in while {inside.read_text()} was inside")
        inside.write_text(str(os.getpid()))
        own.forget_left()
        time.sleep(rng.uniform(0, 0.004))
        if rng.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        if inside.read_text() != str(os.getpid()):
            _found(folder, f"{inside.read_text()} came in while {os.getpid()} was inside")
        inside.unlink()
        own.release()
        with open(folder / "held", "a") as file:
            file.write(".")


def races(kind: str, seconds: float, seed: int) -> tuple[int, int, list[str]]:
    """How often the lock was held and given back, how many holders were killed, and what was wrong."""
    rng, until, killed = random.Random(seed), time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as place, Disk(kind):
        folder, children = Path(place), set()
        while time.monotonic() < until:
            while len(children) < PROCESSES:
                number, child = rng.getrandbits(32), os.fork()
                if not child:
                    try:
                        race(folder, number, until)
                    finally:
                        os._exit(0)
                children.add(child)
            child, status = os.waitpid(-1, 0)
            children.discard(child)
            killed += os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        for child in children:
            os.waitpid(child, 0)
        take_and_give_back(folder)
        held = (folder / "held").stat().st_size if (folder / "held").exists() else 0
        wrong = (folder / "wrong").read_text().splitlines() if (folder / "wrong").exists() else []
    return held, killed, wrong


def _found(folder: Path, text: str) -> None:
    with open(folder / "wrong", "a") as file:
        file.write(text + "\n")


def _silent(text: str) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("kills", "races"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lock._PATIENCE = 1.0  # of a record that is empty, on disks without links
    failed = False
    for kind in Disk.KINDS:
        if given.kind == "kills":
            tried, wrong = kills(kind)
            print(f"kills, {kind}: {tried} tried, {len(wrong)} wrong", *wrong, sep="\n  ", flush=True)
        else:
            held, killed, wrong = races(kind, given.seconds / len(Disk.KINDS), given.seed)
            words = f"{held} times held and given back, {killed} holders killed, {len(wrong)} wrong"
            print(f"races, {kind}: {words}", *wrong[:5], sep="\n  ", flush=True)
        failed = failed or bool(wrong)
    sys.exit(failed)


if __name__ == "__main__":
    main()
