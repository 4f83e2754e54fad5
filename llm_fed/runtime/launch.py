"""This process's place in a launch: its device, and bytes to and from the other ranks over torch.distributed's gloo."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch import distributed

from llm_fed.basics import launchers
from llm_fed.basics.errors import RunError, UserError
from llm_fed.basics.launchers import ProcessRank
from llm_fed.runtime.portable import Codec
from llm_fed.runtime.rendezvous import meet

# A process that dies closes its connections, which the others notice at once. This bounds only the wait for one that
# lives: for a rank at a long share, or for rank 0 at a long step of the server.
TIMEOUT = timedelta(days=1)


class Channel(Protocol):
    """Bytes between the ranks of a launch."""

    size: int

    def send(self, rank: int, data: bytes) -> None: ...

    def receive(self, rank: int) -> bytes: ...


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

    def __init__(self, channel: Channel):
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
    UserError: one has not come, or the launcher was told what would not happen here."""
    launchers.check()
    here = launchers.process_rank()
    if here is None:
        return None
    # gloo also on GPUs: what travels lies in the CPU's memory.
    distributed.init_process_group("gloo", store=meet(here), rank=here.rank, world_size=here.size, timeout=TIMEOUT)
    os.environ.update(RANK=str(here.rank), LOCAL_RANK=str(here.local_rank), WORLD_SIZE=str(here.size))  # of MPI's
    PartialState(cpu=not torch.cuda.is_available(), backend="gloo")
    return Gloo(here)


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
