"""The command line in processes of their own, some of which kill themselves with SIGKILL at a chosen moment.

They are forked from a server that has the libraries imported, so each costs a second and not ten.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["small_process", "llm_fed.cli", "llm_fed.experiment", "llm_fed.eval.runs", "evaluate"])


def run(words: list[str], log: Path, kill_at: tuple[str, int] | None = None) -> int:
    """`llm-fed WORDS` to its end; its exit code, negative for a signal. Both streams go to `log`.

    Args:
        kill_at: ("module:attribute", n): SIGKILL instead of the n-th call (1, 2, ...) of that function.
    """
    process = CONTEXT.Process(target=_run, args=(words, str(log), kill_at))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def calls(words: list[str], log: Path, what: str) -> int:
    """How often the command calls a function ("module:attribute") until it is done."""
    process = CONTEXT.Process(target=_run, args=(words, str(log), (what, -1)))
    process.start()
    process.join()
    assert process.exitcode == 0, log.read_text()
    return int(log.read_text().split()[-1])


def _run(words: list[str], log: str, kill_at: tuple[str, int] | None) -> None:
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    torch.set_num_threads(1)
    from llm_fed import cli

    count = [0]
    if kill_at:
        _die(*kill_at, count)
    try:
        cli.main(words)
    finally:
        print(count[0], file=sys.stderr)


def _die(what: str, n: int, count: list[int]) -> None:
    """Let the n-th call of `what` kill the process instead."""
    place, _, path = what.partition(":")
    owner: Any = importlib.import_module(place)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    real = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == n:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    setattr(owner, name, counted)
