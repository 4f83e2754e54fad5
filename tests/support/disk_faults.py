"""Small runs whose process is killed before every operation on a file, or whose disk is full at every write.

A kill leaves the folder as it is at that moment, so one run is enough to see all of them: before each operation its
folder is copied, where it is another one than before. Of a file that has grown since, two more states are tried, as a
kill within the write leaves them: without what was added, and with half of it. From each state the same command must
end with the same bytes as without a kill. Where the disk is full, the command must say so in one line, leave nothing
half-written, and once there is room the same command must end with the same bytes, too.
"""

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from equal_runs import files

from llm_fed import cli
from llm_fed.runs.inputs import Contents

SECONDS = 120  # for one run, on a busy machine
_CHANGING = {"open", "os.fsync", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link",
             "os.symlink", "os.chmod"}  # fmt: skip


class Faulty:
    """One family's run, again and again in the same place, since paths are part of what is written."""

    def __init__(self, work: Path, config: Path):
        self._work, self._config, self.out = work, config, work / "run"
        code, said = self.start()
        assert code == 0, said
        self.expected = files(self.out)

    def start(self, arm: Callable[[], None] = lambda: None) -> tuple[int, str]:
        """The command in a process of its own: exit code (negative: a signal) and what it said."""
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            sys.stdout, sys.stderr = (open(handle, "w", closefd=False) for handle in (1, 2))  # noqa: SIM115
            _command(["run", str(self._config), "--out", str(self.out), "--json"], arm)
        os.close(writer)
        with open(reader, "rb") as file:
            said = file.read().decode(errors="replace")
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), said

    def states(self) -> list[Path]:
        """Copies of the folder as a kill would leave it, one for each different state."""
        shutil.rmtree(self.out, ignore_errors=True)
        shots = self._work / "shots"
        shutil.rmtree(shots, ignore_errors=True)
        shots.mkdir()
        code, said = self.start(Camera(self.out, shots).arm)
        assert code == 0, said
        return sorted(shots.iterdir())

    def continued(self, state: Path) -> str:
        """What is wrong with the run that the same command continues from a state; empty if nothing is."""
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(state, self.out)
        return self.finished()

    def finished(self) -> str:
        code, said = self.start()
        if code or "Traceback" in said:
            return f"exit code {code}: {said[-500:]}"
        found = files(self.out)
        differing = [name for name in self.expected.keys() | found if self.expected.get(name) != found.get(name)]
        return f"differs in {', '.join(sorted(differing))}" if differing else ""

    def full(self, n: int) -> str | None:
        """What is wrong where the disk is full from the n-th write on; None where there are fewer."""
        shutil.rmtree(self.out, ignore_errors=True)
        reached = self._work / "reached"
        reached.unlink(missing_ok=True)
        code, said = self.start(_FullDisk(self.out, n, reached).arm)
        if not reached.exists():
            return None
        if code == 0:  # to make a folder that is there may fail
            return self.finished()
        errors = [line for line in said.splitlines() if line.startswith("llm-fed: ")]
        if code not in (1, 2) or len(errors) != 1 or said.splitlines()[-1] != errors[0] or "Traceback" in said:
            return f"exit code {code}: {said[-500:]}"
        if self.out.exists():
            left = [path for path in self.out.rglob("*") if "partial" in path.name or not _whole(path)]
            if left:
                return f"half-written: {', '.join(map(str, left))}"
        return self.finished()


class Camera:
    """Copies a folder before every operation on files, where it has changed since the last one."""

    def __init__(self, folder: Path, shots: Path):
        self._folder, self._shots = folder, shots
        self._seen: set[bytes] = set()
        self._sizes: dict[int, int] = {}  # by inode
        self._signature: object = None
        self._busy = False

    def arm(self) -> None:
        sys.addaudithook(self._look)
        os.fsync = lambda handle: self._look("os.fsync", ())  # type: ignore[assignment]

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._busy or event not in _CHANGING:
            return
        self._busy = True
        try:
            signature = [
                (path, found.st_size, found.st_mtime_ns, found.st_ino)
                for path in sorted(self._folder.rglob("*"))
                for found in [path.lstat()]
            ]
            if signature != self._signature and self._folder.exists():
                self._signature = signature
                self._take()
        finally:
            self._busy = False

    def _take(self) -> None:
        paths = {str(path.relative_to(self._folder)): path for path in self._folder.rglob("*") if path.is_file()}
        files = {name: path.read_bytes() for name, path in paths.items()}
        inodes = {name: path.stat().st_ino for name, path in paths.items()}  # what was renamed has not grown
        for name, data in files.items():
            before = self._sizes.get(inodes[name], 0)
            for size in {before, (before + len(data)) // 2} if len(data) > before else ():
                self._keep({**files, name: data[:size]})
        self._keep(files)
        self._sizes = {inodes[name]: len(data) for name, data in files.items()}

    def _keep(self, files: dict[str, bytes]) -> None:
        folders = sorted(str(path.relative_to(self._folder)) for path in self._folder.rglob("*") if path.is_dir())
        digest = hashlib.sha256(repr((sorted(files.items()), folders)).encode()).digest()
        if digest in self._seen:
            return
        self._seen.add(digest)
        shot = self._shots / f"{len(self._seen):05d}"
        for name in ("", *folders):
            (shot / name).mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (shot / name).write_bytes(data)


class _FullDisk:
    """From the n-th operation on that needs room, no file may grow; making and renaming things fails that one time."""

    def __init__(self, folder: Path, n: int, reached: Path):
        self._folder, self._left, self._reached = str(folder), n, reached

    def arm(self) -> None:
        sys.addaudithook(self._look)
        os.fsync = lambda handle: None  # type: ignore[assignment]

    def _look(self, event: str, arguments: tuple[object, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in ("os.mkdir", "os.rename")) or not str(arguments[0]).startswith(self._folder):
            return
        self._left -= 1
        if self._left == 0:
            self._reached.touch()
            path = str(arguments[0])
            if not writes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            most = (os.path.getsize(path) if os.path.exists(path) else 0) + 7
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def _command(words: list[str], arm: Callable[[], None]) -> None:
    """In the forked process; does not return."""
    code = 1
    try:
        torch.set_num_threads(1)
        signal.alarm(SECONDS)
        Contents.ahead = lambda self, config: None  # type: ignore[method-assign]  # one operation after another
        arm()
        cli.main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _whole(path: Path) -> bool:
    """Whether a file that is written at once holds all of what it should; lines are cut back by whoever continues."""
    if path.suffix != ".json":
        return True
    try:
        json.loads(path.read_bytes())
    except ValueError:
        return False
    return True
