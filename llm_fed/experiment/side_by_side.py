"""Trains runs of a comparison side by side, each in a process of its own and as if it were alone.

Every run waits for those that it starts from. Which process takes which run, and which ends first, decides nothing: a
run sees of the others what it would see if they came one after another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, Signals

from llm_fed.basics import cgroups
from llm_fed.basics.errors import RunError, printable
from llm_fed.basics.files import check_unlinked
from llm_fed.experiment.baselines import shared_by
from llm_fed.experiment.job import Job
from llm_fed.experiment.trainer import RunOrder
from llm_fed.runs.records import time_of_day
from llm_fed.runs.tracking import Reporter
from llm_fed.runtime.portable import Codec
from llm_fed.runtime.processes import ChildProcess, end_all, next_reply

LOGS = "logs"  # the folder, beside the runs, of what they print


@dataclass
class _Seat:
    """A place for one process at a time.

    Attributes:
        environment: variables that it gets beside those of this one.
        job: what it does now.
        last: what it did last; the next one may have the same base.
        knows: how many finished runs it was told of.
    """

    environment: Mapping[str, str]
    worker: ChildProcess | None = None
    job: Job | None = None
    last: Job | None = None
    knows: int = 0


class SideBySide:
    """Some jobs, and several processes to train them.

    Args:
        jobs: all runs of the comparison in their order, also those that have ended.
        environments: a process for each, with these variables.
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
        self._waiting = [job for job in jobs if not job.outcome]
        self._finished = [job for job in jobs if isinstance(job.outcome, dict)]
        self._turns = _turns(jobs)
        self._seats = [_Seat(environment) for environment in environments]
        self._logs, self._reporter, self._begins = out / LOGS, reporter, begins
        self._kills = cgroups.kills()

    def trained(self) -> Generator[Job, None, None]:
        """Train all jobs; each when it has ended. Closing it ends the processes.

        Raises:
            RunError: no process can be started, or a log cannot be written.
        """
        try:
            while self._waiting or self._busy():
                yield from self._hindered()
                self._begin()
                if busy := self._busy():
                    yield self._end(next_reply(busy, self._say))
        finally:
            end_all([seat.worker for seat in self._seats if seat.worker], self._say)

    def log(self, job: Job) -> Path:
        """Where what a run prints is kept."""
        return self._logs / f"{job.folder.name}.log"

    def _busy(self) -> list[ChildProcess]:
        return [seat.worker for seat in self._seats if seat.worker and seat.job]

    def _hindered(self) -> Iterator[Job]:
        """The jobs that start from one that has failed, and fail with it."""
        for job in [job for job in self._waiting if job.hindrance]:
            self._waiting.remove(job)
            job.outcome = job.hindrance
            yield job

    def _begin(self) -> None:
        """Give jobs to processes while there are both."""
        for seat in [seat for seat in self._seats if not seat.job]:
            ready = [job for job in self._waiting if self._is_ready(job)]
            if not ready:
                return
            bases = [job.config.base for job in ready]
            loaded = seat.last.config.base if seat.last else None
            job = seat.job = seat.last = ready[bases.index(loaded) if loaded in bases else 0]
            self._waiting.remove(job)
            self._begins(job)
            if not (seat.worker and seat.worker.runs):  # it may have been killed while it had nothing to do
                seat.worker, seat.knows = ChildProcess("llm_fed.experiment.trainer", seat.environment), 0
            self._write(self.log(job), f"--- {time_of_day()} {job.folder}")
            seat.worker.order(job.folder.name, Codec().pack(self._order(seat, job)))
            seat.knows = len(self._finished)

    def _order(self, seat: _Seat, job: Job) -> RunOrder:
        finished = [
            (each.config, each.outcome["base"], str(each.folder))
            for each in self._finished[seat.knows :]
            if isinstance(each.outcome, dict) and "base" in each.outcome
        ]
        parents = {name: str(parent.folder) for name, parent in job.parents.items()}
        return RunOrder(job.config, str(job.folder), parents, finished)

    def _is_ready(self, job: Job) -> bool:
        """Whether nothing that it waits for is still to come. Two merges of one run are not made at once, as each of
        them opens its folder for writing."""
        running = [seat.job for seat in self._seats if seat.job]
        opened = {id(parent) for other in running for parent in other.parents.values()}
        to_come = {id(other) for other in [*self._waiting, *running]}
        parents = {id(parent) for parent in job.parents.values()}
        return not (parents & (opened | to_come) or self._turns[id(job)] & to_come)

    def _end(self, worker: ChildProcess) -> Job:
        """The job of a process that has replied, or has ended with it."""
        seat = next(seat for seat in self._seats if seat.worker is worker)
        job, seat.job, reply = seat.job, None, worker.reply()
        assert job is not None
        if reply is None:
            job.outcome = self._how_it_ended(worker.end())
            worker.say_all(self._say)
            seat.worker, seat.knows = None, 0
        elif failure := Codec().unpack(reply):
            job.outcome = failure
        else:
            job.read()
            assert isinstance(job.outcome, dict), f"{job.folder} has no summary"
            self._finished.append(job)
        return job

    def _how_it_ended(self, code: int) -> str:
        if code != -SIGKILL:
            how = f"the signal {Signals(-code).name}" if -code in [*Signals] else f"exit code {code}"
            return f"its process ended with {how}"
        before, self._kills = self._kills, cgroups.kills()
        killed = any(count > before.get(name, count) for name, count in self._kills.items())
        by = "by the kernel for want of memory" if killed else "(SIGKILL), as the kernel does where memory runs out"
        return f"its process was killed {by}; a smaller --jobs needs less memory"

    def _say(self, name: str, text: str) -> None:
        self._write(self._logs / f"{name}.log", text)
        self._reporter.note(f"{name}: {text}")

    def _write(self, log: Path, text: str) -> None:
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            check_unlinked(log)
            with open(log, "a", encoding="utf-8") as stream:
                stream.write(f"{printable(text)}\n")
        except OSError as error:
            raise RunError(f"cannot write {log}: {error.strerror or error}") from error


def _turns(jobs: Sequence[Job]) -> dict[int, set[int]]:
    """By job, as `id`, the earlier ones for which it waits though it does not start from them.

    At its end a run is compared with a run of `local` that lies beside it. Where there are several, which one it finds
    must not depend on which of them ends first; where there is one, all are compared with it in the end.
    """
    beside: dict[tuple[str, Path], list[Job]] = defaultdict(list)
    for job in jobs:
        beside[shared_by(job.config, ""), job.folder.parent].append(job)
    waits: dict[int, set[int]] = {id(job): set() for job in jobs}
    for group in beside.values():
        is_local = [job.config.method["name"] == "local" for job in group]
        if sum(is_local) > 1:
            for place, job in enumerate(group):
                waits[id(job)] = {id(other) for n, other in enumerate(group[:place]) if is_local[n] != is_local[place]}
    return waits
