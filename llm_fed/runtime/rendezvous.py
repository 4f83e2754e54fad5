"""The processes of a launch find each other, in a bounded time and not in silence."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta

from torch import distributed

from llm_fed.basics.errors import UserError
from llm_fed.basics.launchers import ProcessRank, unset

_SOON = 2.0  # seconds after which a process that waits says so
# Seconds in which all processes must have come. Those of a launcher that is at work may still be importing from a slow
# disk; where nothing but variables speaks of a launch, they are likely to have been left in a shell.
_MANAGED, _UNMANAGED = 600.0, 45.0


def meet(here: ProcessRank, environment: Mapping[str, str] = os.environ) -> distributed.Store:
    """A store that all processes of the launch share, once all are here. UserError: who has not come within the time;
    or where they should meet is not known, or taken."""
    address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
    where = f"{address}:{port}"
    if not address or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(f"MASTER_ADDR and MASTER_PORT are {where!r}, which should say where the {here.size} processes "
                        f"of this launch meet; {unset(environment)}")  # fmt: skip
    managed = "TORCHELASTIC_RUN_ID" in environment or str(here.size) in (
        environment.get(name) for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    )
    until, agent = _Until(here, environment, where, managed), environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = here.rank == 0 and not agent  # the store of torchrun's agent, or else rank 0's own
    try:
        if not keeps:  # torch would print a warning at each attempt
            until.none_of(lambda: [0] * (not _listens(address, int(port))))
        limit = timedelta(seconds=until.limit)
        store = distributed.TCPStore(
            address, int(port), here.size, keeps, limit, wait_for_workers=False, multi_tenant=not agent
        )
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        names = [f"llm_fed/here/{attempt}/{rank}" for rank in range(here.size)]
        store.set(names[here.rank], socket.gethostname())
        until.none_of(lambda: [rank for rank, name in enumerate(names) if not store.check([name])])
    except RuntimeError as error:  # of torch's store
        raise UserError(
            f"rank {here.rank} of {here.size}: the processes of this launch cannot meet at {where} (MASTER_ADDR, "
            f"MASTER_PORT): {str(error).strip().splitlines()[0][:200]}. Choose another port; {unset(environment)}"
        ) from error
    return distributed.PrefixStore(f"llm_fed/attempt/{attempt}", store)  # none reads what a killed attempt has left


class _Until:
    """Waits for other ranks, in all no longer than the limit."""

    def __init__(self, here: ProcessRank, environment: Mapping[str, str], where: str, managed: bool):
        self._here, self._where, self._unset = here, where, unset(environment)
        self.limit, self._began, self._said = _MANAGED if managed else _UNMANAGED, time.monotonic(), False

    def none_of(self, missing: Callable[[], list[int]]) -> None:
        while ranks := missing():
            waited, those = (
                time.monotonic() - self._began,
                f"rank {', '.join(map(str, ranks[:8]))} of {self._here.size}",
            )
            if waited > self.limit:
                raise UserError(
                    f"{those} did not come within {self.limit:.0f} s, although WORLD_SIZE={self._here.size} and "
                    f"LOCAL_RANK={self._here.local_rank} say that this process is one of a launch. Start all within "
                    f"that time; {self._unset}"
                )
            if waited > _SOON and not self._said:
                self._said = True
                print(f"llm-fed: rank {self._here.rank} is waiting for {those} at {self._where}, at most "
                      f"{self.limit - waited:.0f} s more; {self._unset}", file=sys.stderr, flush=True)  # fmt: skip
            time.sleep(0.1)


def _listens(address: str, port: int) -> bool:
    """Whether somebody keeps a store there."""
    with suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
