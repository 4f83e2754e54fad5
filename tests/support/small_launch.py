"""The command line in several processes of one launch, as `accelerate launch` or torchrun would start them."""

import importlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import small_process
from small_process import CONTEXT, Kill

PATIENCE = 90  # seconds after which a process that should have ended counts as left behind


@dataclass(frozen=True)
class Stall:
    """In the place of a function's first call, make a file and do nothing for ever."""

    function: str  # module:attribute
    file: Path

    def arm(self) -> None:
        module, _, name = self.function.partition(":")
        setattr(importlib.import_module(module), name, self._stall)

    def _stall(self, *args: object) -> None:
        self.file.touch()
        while True:
            time.sleep(0.05)


@dataclass(frozen=True)
class Patience:
    """So many seconds in which all ranks of a launch must have come."""

    seconds: float

    def arm(self) -> None:
        from llm_fed.runtime import launch

        launch._UNMANAGED = self.seconds


def torchrun(rank: int, size: int) -> dict[str, str]:
    """The variables by which a process knows its place."""
    return {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


class Launch:
    """`llm-fed WORDS` in so many processes; what each prints on either stream goes to `folder/log-<rank>`.

    Args:
        faults: by rank, where that process kills itself or stands still, or how long it waits.
        ranks: those that are started.
        variables: by rank and size, what says the place of a process.
        also: further variables of all processes.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[object],
        faults: Mapping[int, Kill | Stall | Patience] | None = None,
        size: int = 2,
        *,
        ranks: Sequence[int] | None = None,
        variables: Callable[[int, int], dict[str, str]] = torchrun,
        also: Mapping[str, str] | None = None,
    ):
        launch = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "CUDA_VISIBLE_DEVICES": "", **(also or {})}
        self.logs = [folder / f"log-{rank}" for rank in (range(size) if ranks is None else ranks)]
        self.processes = []
        for rank, log in zip(range(size) if ranks is None else ranks, self.logs, strict=True):
            environment = {**launch, **variables(rank, size)}
            arguments = [str(word) for word in words], str(log), (faults or {}).get(rank), environment
            self.processes.append(CONTEXT.Process(target=_run, args=arguments))
            self.processes[-1].start()

    def ended(self) -> list[int]:
        """The exit codes, negative for a signal, once all have ended."""
        until = time.monotonic() + PATIENCE
        for process in self.processes:
            process.join(max(0.1, until - time.monotonic()))
        left = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in left:
            self.processes[rank].kill()
        assert not left, f"ranks {left} have not ended: {[self.said(rank) for rank in range(len(self.logs))]}"
        return [process.exitcode for process in self.processes if process.exitcode is not None]

    def said(self, rank: int) -> str:
        return self.logs[rank].read_text()


def _run(words: list[str], log: str, fault: Kill | Stall | Patience | None, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    small_process._run(words, log, fault, None)
