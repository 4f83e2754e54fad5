"""Trains runs of a comparison side by side: an ordinary run in a process of its own for each.

A process gets its run as one line of JSON on its standard input and ends when that closes, so none outlives the
command, however it ends. What it prints goes to its log, of which the command repeats each line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from _thread import interrupt_main
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals
from typing import IO, BinaryIO

import torch

from llm_fed.basics.errors import RunError, UserError, printable
from llm_fed.basics.files import check_unlinked
from llm_fed.basics.terminal import Terminal, lasting_streams
from llm_fed.experiment import run
from llm_fed.experiment.baselines import Baselines, shared_by
from llm_fed.experiment.job import Job
from llm_fed.experiment.sharing import keep_to_share
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


@dataclass(eq=False)
class _Process:
    """A run that is being trained."""

    job: Job
    environment: Mapping[str, str]
    popen: subprocess.Popen[bytes]
    log: BinaryIO  # opened for reading, where this process begins to write

    @property
    def input(self) -> IO[bytes]:
        assert self.popen.stdin is not None
        return self.popen.stdin


class SideBySide:
    """Some jobs, and several processes to train them.

    Args:
        jobs: all runs of the comparison in their order, also those that have ended.
        environments: variables of the processes, as many as run at a time.
        out: the folder of the comparison.
        begins: is told of each run that begins.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        environments: Sequence[Mapping[str, str]],
        out: Path,
        reporter: Reporter,
        begins: Callable[[Job], None],
    ):
        self._jobs, self._waiting = jobs, [job for job in jobs if not job.outcome]
        self._turns = _turns(jobs)
        self._free, self._running = [*environments], list[_Process]()
        self._logs, self._reporter, self._begins = out / LOGS, reporter, begins

    def trained(self) -> Generator[Job, None, None]:
        """Train all jobs; each when it has ended. Closing it ends the processes.

        Raises:
            RunError: no process can be started, or a log cannot be written.
        """
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
                for process in self._ended():
                    self._end(process)
                    yield process.job
        finally:
            for process in self._running:
                process.input.close()
            for process in self._running:
                process.popen.wait()

    def log(self, job: Job) -> Path:
        """Where what a run prints is kept."""
        return self._logs / f"{job.folder.name}.log"

    def _is_ready(self, job: Job) -> bool:
        """Whether nothing that it waits for is still to come. Two merges of one run are not made at once, as each of
        them opens its folder for writing."""
        running = {process.job for process in self._running}
        opened = {parent for other in running for parent in other.parents.values()}
        to_come, parents = running.union(self._waiting), {*job.parents.values()}
        return not (parents & (opened | to_come) or self._turns[job] & to_come)

    def _ended(self) -> list[_Process]:
        """The processes that have ended, once any has; until then what all of them print is shown."""
        while self._running:
            if ended := [process for process in self._running if process.popen.poll() is not None]:
                return ended
            time.sleep(_POLL)
            for process in self._running:
                self._repeat(process)
        return []

    def _start(self, job: Job) -> None:
        self._begins(job)
        order = {
            "config": as_dict(job.config),
            "folder": str(job.folder),
            "parents": {name: str(parent.folder) for name, parent in job.parents.items()},
            "base": next((str(other.folder) for other in self._jobs if _has_scored_base(other, job)), ""),
        }
        log, environment = self.log(job), self._free.pop(0)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            check_unlinked(log)
            with open(log, "ab") as stream:
                stream.write(f"--- {time_of_day()} {job.folder}\n".encode())
                reading = open(log, "rb")  # noqa: SIM115
                reading.seek(0, os.SEEK_END)
                popen = subprocess.Popen(
                    [sys.executable, "-c", _START, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=stream,
                    stderr=stream, env={**os.environ, **environment}, bufsize=0,
                    start_new_session=True,  # so that Ctrl-C reaches only this process
                )  # fmt: skip
            self._running.append(process := _Process(job, environment, popen, reading))
            process.input.write(json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            pass  # it has ended, which its exit code says
        except OSError as error:
            raise RunError(
                f"cannot start a process that writes {log}: {error.strerror or error}; fewer --jobs may do"
            ) from error

    def _end(self, process: _Process) -> None:
        """Take over what became of a run whose process has ended."""
        self._running.remove(process)
        self._free.append(process.environment)
        last = self._repeat(process)
        process.log.close()
        process.input.close()
        if (code := process.popen.returncode) == 0:
            process.job.read()
            assert process.job.outcome, f"{process.job.folder} has no summary"
        elif code == -SIGKILL:
            process.job.outcome = (
                "its process was killed (SIGKILL), as the kernel does where memory runs out; a smaller --jobs needs "
                "less memory"
            )
        elif code < 0:
            process.job.outcome = f"its process ended with the signal {Signals(-code).name}"
        else:
            process.job.outcome = last or f"its process ended with exit code {code}"

    def _repeat(self, process: _Process) -> str:
        """Show the lines that a process has printed since it was looked at; the last of them."""
        lines = process.log.readlines()
        if lines and not lines[-1].endswith(b"\n") and process.popen.poll() is None:
            process.log.seek(-len(lines.pop()), os.SEEK_CUR)
        texts = [printable(line.decode(errors="replace").strip()) for line in lines if line.strip()]
        for text in texts:
            self._reporter.note(f"{process.job.folder.name}: {text}")
        return texts[-1] if texts else ""


def _has_scored_base(other: Job, job: Job) -> bool:
    is_done = isinstance(other.outcome, dict) and "base" in other.outcome
    return is_done and shared_by(other.config, "") == shared_by(job.config, "")


def _turns(jobs: Sequence[Job]) -> dict[Job, set[Job]]:
    """By job the earlier ones for which it waits though it does not start from them.

    At its end a run is compared with a run of `local` that lies beside it. Where there are several, which one it finds
    must not depend on which of them ends first; where there is one, all are compared with it in the end.
    """
    beside: dict[tuple[str, Path], list[Job]] = defaultdict(list)
    for job in jobs:
        beside[shared_by(job.config, ""), job.folder.parent].append(job)
    waits: dict[Job, set[Job]] = {job: set() for job in jobs}
    for group in beside.values():
        if sum(job.is_local for job in group) > 1:
            for number, job in enumerate(group):
                waits[job] = {other for other in group[:number] if other.is_local != job.is_local}
    return waits


def main() -> None:
    """The process of one run; its exit code is 1 and its last line the reason where the run fails."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    config, baselines = from_dict(order["config"]), Baselines()
    parents = {name: Path(folder) for name, folder in order["parents"].items()}
    run.quiet()
    keep_to_share()
    try:
        with lasting_streams(), plugins.allowing(plugins.named_in(order["config"]).values()):
            if origin := order["base"]:  # another run, which has the base's scores
                baselines.remember(config, read_object(Path(origin) / "summary.json"), Path(origin))
            run.train(
                config,
                Path(order["folder"]),
                reporter=Reporter(Terminal(stderr=True, force_terminal=False, force_jupyter=False)),
                mode=Simulation(parents, baselines=baselines),
            )
    except (RunError, UserError, torch.OutOfMemoryError) as error:
        sys.exit(" ".join(str(error).split()))
    except KeyboardInterrupt:
        sys.exit(130)


def _end_with_parent() -> None:
    """End this process when its input closes: nobody would look after it."""
    sys.stdin.read()
    interrupt_main()
    time.sleep(_GRACE)
    os._exit(1)
