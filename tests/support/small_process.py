"""The command line in processes of their own, which can be told to kill themselves with SIGKILL at a chosen moment.

They are forked from a server that has imported what a run imports, so each costs half a second and not ten. The server
is itself forked from the tests' process, before its first test and any thread of torch.
"""

import contextlib
import gc
import importlib
import logging
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

import pytest
import torch
import without

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [  # what a run imports, some of it only when it is first needed
        "llm_fed.cli", "llm_fed.experiment.run", "llm_fed.commands.api", "llm_fed.commands.section",
        "llm_fed.tasks.preferences", "llm_fed.kinds.language", "llm_fed.rows.readers",
        "llm_fed.scoring.rouge", "llm_fed.eval.report.run", "llm_fed.eval.report.samples", "peft",
        "transformers.models.llama.modeling_llama", "rouge_score.rouge_scorer", "matplotlib.figure",
        "matplotlib.backends.backend_agg", "PIL.features", "pyarrow.parquet", "pyarrow.pandas_compat", "pytest",
    ]
)  # fmt: skip


def begin() -> None:
    """Fork the server that forks all others."""
    resource_tracker.ensure_running()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _forked)
        forkserver.ensure_running()


def _forked(path: bytes, words: Sequence[str], passed: Sequence[int]) -> int:
    """What a new interpreter would do with these words, of which the last is its program, in a fork of this one."""
    if process := os.fork():
        return process
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        for open_one in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, *passed}:
            with contextlib.suppress(OSError):  # that of the listing is closed
                os.close(open_one)
        _as_new()
        exec(words[-1], {})
    finally:
        os._exit(1)


def _as_new() -> None:
    """Streams and warnings are no longer those of the tests, which keep what is written and make some an error."""
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
    theirs = [*logging.root.handlers]
    for logger in [logging.root, *map(logging.getLogger, logging.root.manager.loggerDict)]:
        for handler in [*logger.handlers]:
            if handler in theirs:
                logger.removeHandler(handler)
            elif type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)


@dataclass(frozen=True)
class Kill:
    """SIGKILL in place of the n-th call (1, 2, ...) of a function whose arguments name a path with `match` in it."""

    function: str  # module:attribute, where it is looked up when it is called
    n: int = 1
    match: str = ""

    def arm(self) -> None:
        module, _, path = self.function.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        real, count = getattr(owner, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += self.match in " ".join(map(_described, args))
            if count == self.n:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(owner, name, counted)


def llm_fed(words: list[str], log: Path, kill: Kill | None = None, largest_file: int | None = None) -> int:
    """`llm-fed WORDS`; its exit code, negative for a signal. What it prints on either stream goes to `log`.

    Args:
        largest_file: in bytes; the system refuses to write more into one file, as it would on a full disk. Pictures of
            the report are drawn only here.
    """
    process = CONTEXT.Process(target=_run, args=(words, str(log), kill, largest_file))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(words: list[str], log: str, kill: Any, largest_file: int | None) -> None:
    gc.freeze()  # the modules need not be looked at again
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    torch.set_num_threads(1)
    from llm_fed import cli

    patch = pytest.MonkeyPatch()
    without.disks(patch)
    without.measures(patch)
    if not largest_file:
        without.pictures(patch)
    if kill:
        kill.arm()
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    cli.main(words)


def call(module: str, function: str, *args: Any) -> None:
    """What a module does that the tests' own process must not import."""
    getattr(importlib.import_module(module), function)(*args)


def train_channels_last() -> None:
    """A step of a ResNet on pictures whose channels stand last in memory."""
    from llm_fed.models.images import RESNETS

    images = torch.randn(32, 3, 64, 64).contiguous(memory_format=torch.channels_last)
    RESNETS["resnet-9"](7)(images).sum().backward()


def _described(argument: Any) -> str:
    """An open file's path, or the argument as text."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return os.readlink(f"/proc/self/fd/{argument}") if os.path.exists(f"/proc/self/fd/{argument}") else ""
    return str(argument)
