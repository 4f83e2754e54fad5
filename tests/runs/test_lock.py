"""The lock of a folder: on disks with locks and without, of processes that were killed, and of other machines."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest

from llm_fed.basics.errors import RunError
from llm_fed.runs import lock
from llm_fed.runs.lock import HeldError, Lock

HOLD = """
import errno, fcntl, sys, time
from pathlib import Path
def refuse(file, operation): raise OSError({code}, "no locks")
if {code}: fcntl.flock = refuse
from llm_fed.runs.lock import Lock
own = Lock(Path({folder!r})); own.acquire(print)
print("held", flush=True)
time.sleep(600)
"""
CODES = [0, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO]  # 0: a disk with locks


@pytest.fixture
def disk(monkeypatch):
    """From then on flock says what a kind of disk says."""

    def call(code: int) -> None:
        def refuse(file: int, operation: int) -> None:
            raise OSError(code, os.strerror(code))

        if code:
            monkeypatch.setattr(fcntl, "flock", refuse)

    return call


def taken(folder: Path, note=pytest.fail) -> Lock:
    own = Lock(folder)
    own.acquire(note)
    return own


@pytest.mark.parametrize("code", CODES)
def test_a_second_process_is_kept_out_and_told_by_whom(tmp_path, disk, code):
    """Once the first is killed the lock is there at once, and the next one is told, once, of the end without a word."""
    held = [sys.executable, "-c", HOLD.format(folder=str(tmp_path), code=code)]
    with subprocess.Popen(held, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline() == "held\n"
            disk(code)
            with pytest.raises(HeldError, match=rf"another process \({process.pid} on .*, since 2"):
                taken(tmp_path)
        finally:
            process.kill()
    said: list[str] = []
    taken(tmp_path, said.append).release()
    taken(tmp_path).release()
    assert said[-1].startswith(f"the last command in {tmp_path} (process {process.pid} on ") and "killed" in said[-1]
    assert {path.name for path in tmp_path.iterdir()} <= {".lock", ".lock.lease", ".lock.holder"}


@pytest.mark.parametrize("code", CODES)
def test_a_second_lock_of_one_process_is_kept_out(tmp_path, disk, code):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    disk(code)
    own = taken(tmp_path)
    with pytest.raises(HeldError, match="another thread of this process"):
        taken(tmp_path / "link")
    own.check()
    own.release()
    taken(tmp_path).release()


def test_a_lock_of_another_program(tmp_path):
    with open(tmp_path / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(HeldError, match="^another process is writing to"):
            taken(tmp_path)


def test_a_process_of_another_machine_is_watched(tmp_path, disk, monkeypatch):
    """Where its lease is renewed it is alive; where it is not, it is taken over, and its holder notices."""
    monkeypatch.setattr(lock, "_PATIENCE", 0.6)
    monkeypatch.setattr(lock, "_BEAT", 0.1)
    disk(errno.ENOLCK)
    other = taken(tmp_path)
    record = tmp_path / ".lock.lease"
    away = "".join(
        "host=node7\n" if line.startswith("host=") else line for line in record.read_text().splitlines(keepends=True)
    )
    with open(record, "r+") as file:
        file.write(away)
        file.truncate()
    (tmp_path / ".lock.holder").write_text("12 on node7, since 2026")
    said: list[str] = []
    with pytest.raises(HeldError, match=r"another process \(12 on node7, since 2026\)"):
        taken(tmp_path, said.append)
    assert len(said) == 1 and "waiting up to " in said[0]
    assert isinstance(other._lock, filelock.SoftFileLease)
    other._lock._stop_heartbeat()  # as if its machine had stopped
    own = taken(tmp_path, said.append)
    own.check()
    other._lock._report_compromise(other._lock._claim, "owner-changed", None, str(other._lock.token))
    with pytest.raises(RunError, match="another process has taken .* over"):
        other.check()
    own.release()


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


@pytest.mark.parametrize("code", CODES[:2])
def test_a_folder_that_cannot_be_written_is_no_lock_that_is_held(tmp_path, disk, monkeypatch, code):
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk(code)
    monkeypatch.setattr(lock, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        taken(tmp_path)
    monkeypatch.setattr(lock, "write_file", lambda path, data: None)
    taken(tmp_path).release()
    (tmp_path / "link").mkdir()
    (tmp_path / "link/.lock").symlink_to(tmp_path / "nothing")
    with pytest.raises(OSError, match="symbolic link"):
        taken(tmp_path / "link")
