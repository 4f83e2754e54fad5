"""Trains runs of a comparison side by side: an ordinary run in a process of its own for each.

A process gets its run as one line of JSON on its standard input and ends when that closes, so none outlives the
command, however it ends. What it prints goes to its log.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any, Protocol

import psutil
import torch
from rich.filesize import decimal

from llm_fed.basics import cgroups
from llm_fed.basics.documents import Json
from llm_fed.basics.errors import RunError, UserError, printable
from llm_fed.basics.files import check_unlinked
from llm_fed.basics.terminal import Terminal, lasting_streams
from llm_fed.experiment import run
from llm_fed.experiment.baselines import Baselines, shared_by
from llm_fed.experiment.job import Job
from llm_fed.experiment.simulation import Simulation
from llm_fed.runs.records import read_object, time_of_day
from llm_fed.runs.tracking import Reporter
from llm_fed.settings import plugins
from llm_fed.settings.configfile import as_dict, from_dict

LOGS = "logs"  # the folder, beside the runs, of what they print
_GRACE = 5.0  # seconds in which a process may leave what it does; then it ends in the midst of it
_POLL = 0.1  # seconds
# Not `-m`, which would look for all modules in the current folder first.
_START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"
_DEVICES = "CUDA_VISIBLE_DEVICES"


class RunProcess(Protocol):
    """A run that is being trained, with verbs of `subprocess.Popen`."""

    returncode: Any

    def poll(self) -> int | None: ...
    def wait(self) -> object: ...
    def end(self) -> None:
        """Tell it to end."""


Start = Callable[[Mapping[str, Any], Path], RunProcess]  # from what `perform` takes, and the log


class Process(subprocess.Popen[bytes]):
    """A run in a process of this machine."""

    @classmethod
    def begin(cls, environment: Mapping[str, str], order: Mapping[str, Json], log: Path) -> Process:
        """Args: variables that it gets beside those of this one."""
        with open(log, "ab") as stream:
            process = cls(
                [sys.executable, "-c", _START, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=stream,
                stderr=stream, env={**os.environ, **environment}, bufsize=0,
                start_new_session=True,  # so that Ctrl-C reaches only this process
            )  # fmt: skip
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which its exit code says
            process.stdin.write(json.dumps(order).encode() + b"\n")
        return process

    def end(self) -> None:
        assert self.stdin is not None
        self.stdin.close()


class SideBySide:
    """Some jobs, and several processes to train them.

    Args:
        jobs: all runs of the comparison in their order, also those that have ended.
        starts: what begins a run, as many as run at a time.
        out: the folder of the comparison.
        begins: is told of each run that begins.
    """

    def __init__(self, jobs: Sequence[Job], starts: Sequence[Start], out: Path, begins: Callable[[Job], None]):
        self._jobs, self._waiting = jobs, [job for job in jobs if not job.outcome]
        self._free, self._running = [*starts], dict[Job, tuple[Start, RunProcess]]()
        self._logs, self._begins = out / LOGS, begins

    def trained(self) -> Generator[Job, None, None]:
        """Train all jobs; each when it has ended. Closing it ends the processes. RunError: no process can be started,
        or a log cannot be written."""
        try:
            while self._waiting or self._running:
                for job in [*self._waiting]:
                    if job.hindrance:
                        self._waiting.remove(job)
                        job.outcome = job.hindrance
                        yield job
                    elif self._free and self._is_ready(job):
                        self._waiting.remove(job)
                        self._start(job)
                for job in self._ended():
                    self._end(job)
                    yield job
        finally:
            for _, work in self._running.values():
                work.end()
            for _, work in self._running.values():
                work.wait()

    def log(self, job: Job) -> Path:
        """Where what a run prints is kept."""
        return self._logs / f"{job.folder.name}.log"

    def _is_ready(self, job: Job) -> bool:
        """Whether nothing that it waits for is still to come. Two merges of one run are not made at once, as each of
        them opens its folder for writing; and others wait for all of `local`, with one of which they are compared."""
        opened = {parent for other in self._running for parent in other.parents.values()}
        to_come, parents = {*self._running, *self._waiting}, {*job.parents.values()}
        last = not job.is_local and any(other.is_local for other in to_come)
        return not (last or parents & (opened | to_come))

    def _ended(self) -> list[Job]:
        """The runs that have ended, once any has."""
        while self._running:
            if ended := [job for job, (_, work) in self._running.items() if work.poll() is not None]:
                return ended
            time.sleep(_POLL)
        return []

    def _start(self, job: Job) -> None:
        self._begins(job)
        scored = (other for other in self._jobs if isinstance(other.outcome, dict) and "base" in other.outcome)
        shared = shared_by(job.config, "")
        order = {
            "config": as_dict(job.config),
            "folder": str(job.folder),
            "parents": {name: str(parent.folder) for name, parent in job.parents.items()},
            "base": next((str(other.folder) for other in scored if shared_by(other.config, "") == shared), ""),
        }
        log, start = self.log(job), self._free.pop(0)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            check_unlinked(log)
            with open(log, "ab") as stream:
                stream.write(f"--- {time_of_day()} {job.folder}\n".encode())
            self._running[job] = start, start(order, log)
        except OSError as error:
            raise RunError(
                f"cannot start a process that writes {log}: {error.strerror or error}; fewer --jobs may do"
            ) from error

    def _end(self, job: Job) -> None:
        """Take over what became of a run that has ended."""
        start, work = self._running.pop(job)
        self._free.append(start)
        work.end()
        if (code := work.returncode) == 0:
            job.read()
            assert job.outcome, f"{job.folder} has no summary"
        elif code == -SIGKILL:
            job.outcome = (
                "its process was killed (SIGKILL), as the kernel does where memory runs out; a smaller --jobs needs "
                "less memory"
            )
        elif code < 0:
            job.outcome = f"its process ended with the signal {Signals(-code).name}"
        else:
            last = self.log(job).read_text(errors="replace").strip().rpartition("\n")[2]
            job.outcome = printable(last) or f"its process ended with exit code {code}"


def main() -> None:
    """The process of one run; its exit code is 1 and its last line the reason where the run fails."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    try:
        sys.exit(perform(order) or 0)
    except KeyboardInterrupt:
        sys.exit(130)


def perform(order: Mapping[str, Any]) -> str:
    """Train the run of an order, or go on with it; why it failed, and empty where it did not."""
    config, baselines = from_dict(order["config"]), Baselines()
    parents = {name: Path(folder) for name, folder in order["parents"].items()}
    run.quiet()
    try:
        with lasting_streams(), plugins.allowing(plugins.named_in(order["config"]).values()):
            if origin := order["base"]:  # another run, which has the base's scores
                baselines.remember(config, read_object(Path(origin) / "summary.json"), Path(origin))
            run.train(
                config,
                Path(order["folder"]),
                reporter=Reporter(Terminal(stderr=True, force_terminal=False)),
                mode=Simulation(parents, baselines=baselines),
            )
    except (RunError, UserError, torch.OutOfMemoryError) as error:
        return " ".join(str(error).split())
    return ""


def _end_with_parent() -> None:
    """End this process when its input closes: nobody would look after it."""
    sys.stdin.read()
    interrupt_main()
    time.sleep(_GRACE)
    os._exit(1)


def shares(jobs: int, processes: int, base: int, device: torch.device, divided: bool) -> list[dict[str, str]]:
    """The variables that so many processes get, which then keep to an equal part of the cores and of the memory, or to
    a GPU of their own. Each takes as much memory as this one, which has loaded a base and gives it back.
    UserError: they do not fit; how many would.

    Args:
        jobs: how many were requested.
        base: bytes of its weights.
        divided: whether one run takes all GPUs (`base.device_map`).
    """
    here, free = psutil.Process().memory_full_info().uss, cgroups.free_for_all() + base * (device.type == "cpu")
    if processes * here > free:
        raise UserError(
            f"--jobs {jobs} does not fit: {processes} at a time, each of which takes about {decimal(here)} before it "
            f"trains; {decimal(free)} are free. --jobs {max(1, free // here)} needs less"
        )
    common = {cgroups.SHARE: str(cgroups.free_for_all() // processes)}
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))
    if device.type != "cuda":
        return [common] * processes
    names = [name for name in os.environ.get(_DEVICES, "").split(",") if name]
    names = names or [str(number) for number in range(torch.cuda.device_count())]
    most = 1 if divided else len(names)
    if processes > most:
        raise UserError(f"--jobs {jobs} does not fit: each of {processes} runs takes a GPU. --jobs {most} needs less")
    return [{**common, _DEVICES: name} for name in names[:processes]]
