"""The processes of a launch find each other, in a bounded time and not in silence."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch import distributed

from llm_fed.basics.errors import UserError
from llm_fed.basics.launchers import ProcessRank, unset

_SOON = 2.0  # seconds after which a process that waits says for whom
_AGAIN = 30.0  # seconds between such lines
# Seconds in which all processes must have come. Those of a launcher that is at work may still be importing from a slow
# disk; where nothing but variables speaks of a launch, they are likely to have been left in a shell.
_MANAGED, _UNMANAGED = 600.0, 45.0


def meet(here: ProcessRank, environment: Mapping[str, str] = os.environ) -> distributed.Store:
    """A store that all processes of the launch share, once all are here.

    Raises:
        UserError: who has not come within the time; or where they should meet is not known, or taken.
    """
    return _Meeting(here, environment).held()


class _Meeting:
    def __init__(self, here: ProcessRank, environment: Mapping[str, str]):
        self._here, self._environment = here, environment
        self._address, self._port = self._where()
        # The store of torchrun's agent, or else rank 0's own.
        self._agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._limit = _MANAGED if _managed(here, environment) else _UNMANAGED
        self._began, self._said = time.monotonic(), -_AGAIN

    def held(self) -> distributed.Store:
        store = self._store()
        attempt = self._environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        names = [f"llm_fed/here/{attempt}/{rank}" for rank in range(self._here.size)]
        try:
            store.set(names[self._here.rank], socket.gethostname())
            while missing := [rank for rank, name in enumerate(names) if not store.check([name])]:
                self._wait_for(missing)
        except RuntimeError as error:  # of torch's store: whoever keeps it has gone
            raise UserError(
                f"rank {self._here.rank} of {self._here.size}: the launch has ended while its processes were still "
                f"coming ({self._address}:{self._port} has closed)"
            ) from error
        return distributed.PrefixStore(f"llm_fed/attempt/{attempt}", store)  # none reads what a killed attempt has left

    def _where(self) -> tuple[str, int]:
        address, port = (self._environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if not address or not port.isdigit() or not 0 < int(port) < 2**16:
            name, value = ("MASTER_PORT", port) if address else ("MASTER_ADDR", address)
            raise UserError(
                f"{name}={value!r}, which should say where the {self._here.size} processes of this launch meet; "
                f"{unset(self._environment)}"
            )
        return address, int(port)

    def _store(self) -> distributed.Store:
        keeps = self._here.rank == 0 and not self._agent
        if not keeps:
            while not self._listens():
                self._wait_for([0])
        try:
            return distributed.TCPStore(
                self._address, self._port, self._here.size, keeps, timedelta(seconds=self._limit),
                wait_for_workers=False, multi_tenant=not self._agent,
            )  # fmt: skip
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:200]
            raise UserError(
                f"the processes of this launch cannot meet at {self._address}:{self._port} (MASTER_ADDR, MASTER_PORT): "
                f"{reason}. Choose another port; {unset(self._environment)}"
            ) from error

    def _listens(self) -> bool:
        """Whether somebody keeps a store there; torch would print a warning at each attempt."""
        with suppress(OSError), socket.create_connection((self._address, self._port), timeout=1):
            return True
        return False

    def _wait_for(self, missing: list[int]) -> None:
        """A moment; says for whom, unless rank 0 says it."""
        waited = time.monotonic() - self._began
        size, ranks = self._here.size, _ranks(missing)
        if waited > self._limit:
            raise UserError(
                f"{ranks} of {size} did not come within {self._limit:.0f} s, although WORLD_SIZE={size} and "
                f"LOCAL_RANK={self._here.local_rank} say that this process is one of a launch. Start all within that "
                f"time; {unset(self._environment)}"
            )
        if waited > _SOON and waited - self._said > _AGAIN and (self._here.rank == 0 or 0 in missing):
            self._said = waited
            print(
                f"llm-fed: rank {self._here.rank} is waiting for {ranks} of {size} at {self._address}:{self._port}, "
                f"at most {self._limit - waited:.0f} s more; {unset(self._environment)}",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(0.1)


def _managed(here: ProcessRank, environment: Mapping[str, str]) -> bool:
    """Whether a launcher or a job system stands behind the variables."""
    counts = (environment.get(name, "") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    return "TORCHELASTIC_RUN_ID" in environment or str(here.size) in counts


def _ranks(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}"
