"""This process in a launch: its device, and bytes to and from the other ranks over torch.distributed's gloo."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any

import torch
from accelerate import PartialState
from torch import distributed

from llm_fed.basics import launchers
from llm_fed.basics.errors import RunError, UserError, one_line
from llm_fed.basics.launchers import ProcessRank
from llm_fed.runtime.portable import Codec

# A process that dies closes its connections, which the others notice at once. This bounds only the wait for one that
# lives: for a rank at a long share, or for rank 0 at a long step of the server.
TIMEOUT = timedelta(days=1)
# Seconds in which all processes must have come. Those of a launcher that is at work may still be importing from a slow
# disk; where nothing but variables speaks of a launch, they are likely to have been left in a shell.
_MANAGED, _UNMANAGED = 600.0, 45.0
_SOON = 2.0  # seconds after which a process that waits for others says so


class Gloo:
    """Messages between this process and another, over torch.distributed's gloo, on the CPU. RunError: from `send` and
    `receive`: the other process has gone."""

    def __init__(self, here: ProcessRank):
        self.rank, self.size = here.rank, here.size

    def send(self, rank: int, data: bytes) -> None:
        with _noticing(rank):
            distributed.send(torch.tensor([len(data)]), rank)
            distributed.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), rank)

    def receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        with _noticing(rank):
            distributed.recv(length, rank)
            data = torch.empty(int(length), dtype=torch.uint8)
            distributed.recv(data, rank)
        return data.numpy().tobytes()


@contextmanager
def _noticing(rank: int) -> Iterator[None]:
    """Turns a broken connection to `rank` into a RunError."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[\S+\] ", "", str(error).strip().splitlines()[-1]).split(". ")[0][:200]
        raise RunError(
            f"rank {rank} of this launch has gone ({reason}); give the same command again to continue from the last "
            "checkpoint"
        ) from error


class Ranks:
    """The other ranks, as rank 0 sees them. Use as a context manager: leaving it lets them end.

    Attributes:
        opened: whose configuration they have built.
    """

    def __init__(self, channel: Gloo):
        self.channel, self.size = channel, channel.size
        self.opened: object = None
        self._busy: set[int] = set()

    def __enter__(self) -> Ranks:
        if threading.current_thread() is threading.main_thread():  # no other may have handlers of signals
            signal.signal(signal.SIGTERM, _terminated)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._busy:  # a rank at work would be waited for: it ends by itself once this process is gone
            return
        with suppress(RunError):
            for rank in range(1, self.size):
                self.send(rank, Codec().pack(["stop"]))
            distributed.destroy_process_group()

    def send(self, rank: int, order: bytes) -> None:
        self._busy.add(rank)
        self.channel.send(rank, order)

    def replies(self, codec: Codec) -> dict[int, Any]:
        """What every rank that was sent an order has answered. UserError, RunError: one of them failed; all have been
        heard, and wait for the next order."""
        answers = {}
        for rank in sorted(self._busy):
            answers[rank] = codec.unpack(self.channel.receive(rank))
            self._busy.remove(rank)
        for reply in answers.values():
            if isinstance(reply, Exception):
                raise reply
        return answers


@cache
def connect() -> Gloo | None:
    """The connection to the other processes of this launch; None where this one is alone. Waits until all are here.
    UserError: one has not come."""
    here = launchers.process_rank()
    if here is None:
        return None
    meet(here)
    os.environ.update(RANK=str(here.rank), LOCAL_RANK=str(here.local_rank), WORLD_SIZE=str(here.size))  # of MPI's
    PartialState(cpu=not torch.cuda.is_available(), backend="gloo")
    return Gloo(here)


def meet(here: ProcessRank) -> None:
    """Connect all processes of the launch, once all are here. UserError: they have not come within the time, or where
    they should meet is not known, or taken."""
    names = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    managed = "TORCHELASTIC_RUN_ID" in os.environ or str(here.size) in map(os.environ.get, names)
    limit = _MANAGED if managed else _UNMANAGED
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')} (MASTER_ADDR, MASTER_PORT)"
    waits = f"llm-fed: rank {here.rank} is waiting for others of {here.size} at {where}; {launchers.unset()}"
    note = threading.Timer(_SOON, print, [waits], {"file": sys.stderr, "flush": True})
    note.start()
    try:
        until = time.monotonic() + limit
        while here.rank and time.monotonic() < until and not _listens():
            time.sleep(0.1)  # torch would print a warning at each attempt
        address = f"env://?rank={here.rank}&world_size={here.size}"
        left = timedelta(seconds=max(1.0, until - time.monotonic()))
        store, *_ = next(distributed.rendezvous(address, timeout=left))
        # None reads what an attempt has left that was killed.
        own = distributed.PrefixStore(f"llm_fed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        # gloo also on GPUs: what travels lies in the CPU's memory.
        distributed.init_process_group("gloo", store=own, rank=here.rank, world_size=here.size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:  # of torch's store
        raise UserError(
            f"rank {here.rank} of {here.size}: the processes of this launch do not meet at {where} within "
            f"{limit:.0f} s ({one_line(str(error), 200)}). Start all within that time, or choose another port; "
            f"{launchers.unset()}"
        ) from error
    finally:
        note.cancel()


def _listens() -> bool:
    """Whether somebody keeps a store where the processes meet."""
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", ""))
    with suppress(OSError), socket.create_connection(address, timeout=1):
        return True
    return False


def processes() -> int:
    """How many processes this launch has; 1 without a launcher."""
    channel = connect()
    return channel.size if channel else 1


@cache
def other_ranks() -> Ranks | None:
    """The other ranks of this launch; None where this process is alone. RunError: this process is not rank 0."""
    channel = connect()
    if channel and channel.rank:
        raise RunError(
            f"rank {channel.rank} of a launch trains nothing of its own; let it call experiment.run.join_launch()"
        )
    return Ranks(channel) if channel else None


def choose_device(requested: str) -> str:
    """The device of this process: where `device` is auto, a GPU of its own if there is one (a Mac's is none), unless
    accelerate's configuration says use_cpu. UserError: cuda is requested and there is none."""
    untried = launchers.wants_cpu() or torch.backends.mps.is_available()  # nobody has trained on mps
    on_cpu = requested == "cpu" or (requested == "auto" and untried)
    with nullcontext() if connect() else launchers.alone():
        state = PartialState(cpu=on_cpu)
    if requested == "cuda" and state.device.type != "cuda":
        raise UserError("device is cuda, but torch finds no GPU; use device=auto or device=cpu")
    return "cpu" if on_cpu else str(state.device)


def _terminated(number: int, frame: FrameType | None) -> None:
    print(
        "llm-fed: terminated, because another process of this launch failed or the launch was stopped", file=sys.stderr
    )
    raise KeyboardInterrupt
