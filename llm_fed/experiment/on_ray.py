"""Runs of a comparison on several machines: each is a task of Ray, which gives that of a killed process to another one.

The machines see the folder of the comparison and the one in which the command was given, and have the same packages.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_fed.basics.errors import UserError, install, one_line
from llm_fed.experiment.side_by_side import Start, perform

RETRIES = 3  # further processes for a run whose process was killed


def check_installed() -> None:
    """UserError says how to install Ray."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"--jobs ray needs Ray, which is not installed; {install('ray')}")


@contextmanager
def cluster(runs: int, device: str, note: Callable[[str], None]) -> Iterator[Start]:
    """What begins a run on one of Ray's machines: those of RAY_ADDRESS, of the cluster that this machine belongs to, or
    this one alone. A run takes a GPU where there are any, else an equal part of the CPUs. UserError: Ray cannot be
    reached."""
    import ray

    if own := not ray.is_initialized():
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            raise UserError(f"Ray cannot be reached: {one_line(str(error))}") from error
    try:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        cpus = [int(machine["CPU"]) for machine in machines if machine.get("CPU")]
        gpus = int(device != "cpu" and any(machine.get("GPU") for machine in machines))
        cores = 1 if gpus else max(1, min([sum(cpus) // runs, *cpus]))
        share = "each takes a GPU" if gpus else f"threads of each: {cores}"
        note(f"{runs} runs are given to Ray, which has {sum(cpus)} CPUs on {len(machines)} machine(s); {share}")
        remote = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=RETRIES, max_calls=1)(_perform)
        yield lambda order, log: RayTask(remote.remote(order, str(log), os.getcwd()), log)
    finally:
        if own:
            ray.shutdown()


class RayTask:
    """A run that Ray has, with the verbs of `subprocess.Popen`."""

    def __init__(self, reference: Any, log: Path):
        self._reference, self._log = reference, log
        self.returncode: int | None = None

    def poll(self) -> int | None:
        import ray

        if self.returncode is None and ray.wait([self._reference], timeout=0)[0]:
            try:
                self.returncode = ray.get(self._reference)
            except ray.exceptions.RayError as error:
                with self._log.open("a") as log:
                    log.write(f"{error}\n")
                self.returncode = 1
        return self.returncode

    def end(self) -> None:
        import ray

        ray.cancel(self._reference, force=True)

    def wait(self) -> None:
        """Ray looks after its processes."""


def _perform(order: Mapping[str, Any], log: str, folder: str) -> int:
    """In a process of Ray: the run, with its log as standard output and error; its exit code."""
    here = socket.gethostname()
    if not Path(log).is_file():
        raise UserError(f"{here} has no {log}; --jobs ray needs a disk that all machines see")
    os.chdir(folder)
    stream = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    print(f"a process of {here} takes it", flush=True)
    if failure := perform(order):
        print(failure, flush=True)
    return int(bool(failure))
