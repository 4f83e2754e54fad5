"""The lock of a folder: on disks with locks and without, left behind by processes that were killed, and on others'
machines."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import every
import lock_faults
import pytest

from llm_fed.basics import cgroups, mounts
from llm_fed.basics.errors import RunError
from llm_fed.runs import lock
from llm_fed.runs.holder import Holder
from llm_fed.runs.lock import HeldError, Lock

HOLD = """
import sys, time
from pathlib import Path
sys.path.insert(0, {support!r})
import lock_faults
from llm_fed.runs.lock import Lock
with lock_faults.Disk({kind!r}):
    Lock(Path({folder!r})).acquire(print)
    print("held", flush=True)
    time.sleep(600)
"""


class Elsewhere:
    """A process of its own that holds the lock of a folder, until it is killed."""

    def __init__(self, folder: Path, kind: str):
        code = HOLD.format(support=str(Path(lock_faults.__file__).parent), folder=str(folder), kind=kind)
        self.process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        assert self.process.stdout and self.process.stdout.readline() == "held\n"
        return self.process

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()


def taken(folder: Path) -> Lock:
    own = Lock(folder)
    own.acquire(pytest.fail)
    return own


def leave(folder: Path, **changes: object) -> Holder:
    """A record as another process would have left it."""
    holder = replace(Holder.me(), **changes)  # type: ignore[arg-type]
    (folder / ".lock.1").write_bytes(holder.as_json())
    return holder


@pytest.mark.parametrize("kind", every.quick(lock_faults.Disk.KINDS, ["good", "ENOLCK", "generous", "no-links"]))
def test_a_second_process_is_kept_out_and_told_by_whom(tmp_path, kind):
    """Also where every process gets each flock. Once the first is killed, the lock is there at once."""
    with Elsewhere(tmp_path, kind) as process, lock_faults.Disk(kind):
        with pytest.raises(HeldError, match=rf"another process \({process.pid} on .*, since 2"):
            taken(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()  # its remains stay until somebody asks for them, and do not count
        own = taken(tmp_path)
        assert own.left and own.left.pid == process.pid and own.left.end().startswith("the last command here (process ")
        own.forget_left()
        own.release()
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("kind", ["good", "ENOLCK", "generous"])
def test_a_second_thread_is_kept_out(tmp_path, kind):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with lock_faults.Disk(kind):
        own = taken(tmp_path)
        with pytest.raises(HeldError, match="another thread of this process"):
            taken(tmp_path / "link")
        own.release()
        taken(tmp_path).release()


def test_a_lock_that_an_earlier_version_holds(tmp_path):
    """Or any program that calls flock and leaves no record."""
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(HeldError, match="^another process$"):
            taken(tmp_path)


@pytest.mark.parametrize("kind", every.quick(lock_faults.Disk.KINDS, ["good", "ENOLCK"]))
def test_a_kill_at_any_operation_leaves_a_lock_that_can_be_had(kind, monkeypatch):
    monkeypatch.setattr(lock, "_PATIENCE", 0.2)
    tried, wrong = lock_faults.kills(kind)
    assert tried > 10 and wrong == []


@pytest.mark.parametrize("kind", ["good", "ENOLCK", "generous"])
def test_of_processes_that_contend_one_has_the_lock_at_a_time(kind):
    held, _, wrong = lock_faults.races(kind, 0.4, seed=0)
    assert held and wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", lock_faults.Disk.KINDS)
def test_of_processes_that_contend_for_long_one_has_the_lock_at_a_time(kind):
    held, killed, wrong = lock_faults.races(kind, 20.0, seed=1)
    assert held > 50 and killed > 10 and wrong == []


@pytest.mark.parametrize(
    "changes",
    [
        {"pid": 2**22 + 5},  # above the most that Linux gives
        {"start": 1},  # its number has gone to another process
        {"pid": os.getppid(), "start": 1},
        {},  # this very process, which does not hold the lock any more
    ],
)
def test_a_record_of_a_process_that_has_ended_holds_nobody_up(tmp_path, changes):
    leave(tmp_path, **changes)
    with lock_faults.Disk("ENOLCK"):
        own = taken(tmp_path)
    own.release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"host": 1}', b"\xff" * 40, b"9" * 5000])
def test_a_damaged_record_holds_nobody_up_for_long(tmp_path, monkeypatch, content):
    monkeypatch.setattr(lock, "_PATIENCE", 0.05)
    (tmp_path / ".lock.1").write_bytes(content)
    said: list[str] = []
    with lock_faults.Disk("ENOLCK"):
        own = Lock(tmp_path)
        own.acquire(said.append)
        own.release()
    assert len(said) == 1 and str(tmp_path / ".lock.1") in said[0] and "delete the file" in said[0]


def test_a_link_to_nothing_in_the_place_of_a_record_is_passed_over(tmp_path):
    """It was tried again without end: the name was taken, and there was nothing to read."""
    (tmp_path / ".lock.1").symlink_to(tmp_path / "nothing")
    held = Lock(tmp_path)
    held.acquire(print)
    assert (tmp_path / ".lock.2").is_file() and not (tmp_path / "nothing").exists()
    held.release()
    assert not (tmp_path / ".lock.2").exists()


def test_after_the_last_possible_record_there_is_none(tmp_path):
    (tmp_path / ".lock.999999999").write_text("{}")
    with pytest.raises(HeldError, match="lock.999999999, the last possible record"):
        Lock(tmp_path).acquire(print)


def test_a_process_of_another_machine_is_watched(tmp_path, monkeypatch):
    """Where the record is renewed it is alive; where it is not, it is superseded, and notices it when it writes."""
    monkeypatch.setattr(lock, "_PATIENCE", 0.5)
    monkeypatch.setattr(lock, "_BEAT", 0.05)
    with lock_faults.Disk("ENOLCK"):
        other = taken(tmp_path)
        away = replace(Holder.me(), host="node7", system="another boot/1")
        record = tmp_path / ".lock.1"
        with open(record, "r+b") as file:
            file.write(away.as_json())
            file.truncate()
        lock._held.clear()
        said: list[str] = []
        with pytest.raises(HeldError, match=r"another process \(\d+ on node7, since .*; it renews .*\.lock\.1"):
            Lock(tmp_path).acquire(said.append)
        assert len(said) == 1 and "waiting up to " in said[0]
        assert other._stop
        other._stop.set()  # its thread, as if its machine had stopped
        time.sleep(0.1)
        own = Lock(tmp_path)
        own.acquire(said.append)
        assert own.left == away and "killed, or its machine stopped" in away.end()
        own.check()
        with pytest.raises(RunError, match="another process has taken .* over"):
            other.check()
        own.release()
        other._record = None
        other.release()


def test_on_a_disk_of_its_own_a_machine_believes_its_locks(tmp_path):
    """A record of another machine, in a copied folder, holds nobody up."""
    leave(tmp_path, host="node7", system="another boot/1")
    own = taken(tmp_path)
    assert own.left and own.left.host == "node7" and own._stop is None
    own.release()


@pytest.mark.parametrize(("kind", "own"), [("ext4", True), ("nfs4", False), ("lustre", False), ("fuse.sshfs", False)])
def test_whose_disk_it_is(tmp_path, monkeypatch, kind, own):
    place = tmp_path / "a b"
    place.mkdir()
    told = f"1 0 8:1 / / rw - xfs /dev/x rw\n2 1 0:9 / {str(place).replace(' ', chr(92) + '040')} rw - {kind} x rw\n"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(told)
    found = mounts.holding(place / "run", root=tmp_path)
    assert found and found.kind == kind
    monkeypatch.setattr(mounts, "holding", lambda folder: found)
    assert lock._is_own_disk(place) == own


def test_a_lock_is_not_kept_by_processes_that_were_forked_meanwhile(tmp_path):
    own = taken(tmp_path)
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        own.release()
        taken(tmp_path).release()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_folder_that_cannot_be_written_is_no_lock_that_is_held(tmp_path, monkeypatch):
    def full(self: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock.Holder, "as_json", full)
    with pytest.raises(OSError, match="No space left"):
        taken(tmp_path)
    monkeypatch.undo()
    taken(tmp_path).release()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        ({"/job_7": 0, "machine": 3}, {"/job_7": 1, "machine": 4}, "a process of the control group /job_7 for want of"),
        ({"/job_7": 0, "machine": 3}, {"/job_7": 0, "machine": 4}, "a process of this machine for want of memory"),
        ({"/job_7": 1, "machine": 3}, {"/job_7": 1, "machine": 3}, "without a word: it was killed"),
        ({"/job_7": 1}, {"/job_8": 9}, "without a word: it was killed"),  # a job of its own each
        ({}, {}, "without a word: it was killed"),
    ],
)
def test_how_a_process_seems_to_have_ended(monkeypatch, then, now, says):
    monkeypatch.setattr(cgroups, "kills", lambda: now)
    monkeypatch.setattr(cgroups, "group_limits", lambda: [cgroups.MemoryLimit("memory.max of /job_7", 3 * 2**30, 0)])
    assert says in replace(Holder.me(), kills=then).end()
    limited = "(its limit is 3.00 GiB)" in replace(Holder.me(), kills=then).end()
    assert limited == ("control group" in says)
    assert json.loads(Holder.me().as_json()) == asdict(Holder.me())


def test_threads_race_for_a_lock(tmp_path):
    got: list[Lock] = []

    def job() -> None:
        with_lock = Lock(tmp_path)
        try:
            with_lock.acquire(print)
            got.append(with_lock)
        except HeldError:
            pass

    with lock_faults.Disk("ENOLCK"):
        threads = [threading.Thread(target=job) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 1
    got[0].release()
