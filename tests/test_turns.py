"""Threads of one process: turns at models, runs side by side, and what the program around may not change; and locks of
other packages, which a disk may not have."""

import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import equal_runs
import filelock
import pytest
import small_run
import tiny_base
import tiny_images
import torch
from equal_runs import assert_same, files
from rich.console import Console
from transformers import PreTrainedModel

import llm_fed
from llm_fed import rows
from llm_fed.basics import turns
from llm_fed.basics.errors import UserError, no_locks
from llm_fed.experiment import run
from llm_fed.kinds.language import load_base
from llm_fed.models.loading import explain
from llm_fed.runs import lock
from llm_fed.runs.tracking import Reporter
from llm_fed.settings.config import BaseConfig
from llm_fed.settings.configfile import from_dict

SECONDS = 120  # in which threads that should end have ended, on a busy machine


def together(*jobs: Callable[[], None]) -> None:
    """The jobs in a thread each; what one of them raises is raised."""
    errors: list[BaseException] = []

    def watched(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=[job], daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    for error in errors:
        raise error


def test_one_thread_at_a_time_has_the_turn_and_whoever_waits_is_told_why(monkeypatch):
    monkeypatch.setattr(turns, "_SOON", 0.05)
    said: list[str] = []
    order: list[str] = []
    held = threading.Event()

    def first() -> None:
        with turns.taken(said.append), turns.taken(said.append):  # the turn may be taken again
            held.set()
            while not said:
                time.sleep(0.01)
            order.append("first")

    def second() -> None:
        held.wait()
        with turns.taken(said.append):
            order.append("second")

    together(first, second)
    assert order == ["first", "second"]
    assert said == ["waiting for another thread of this process, which is loading, training or answering"]


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_settings_of_the_program_around(small, tmp_path, kind):
    """Its default dtype and its modes of torch change nothing within a run, and are its own again afterwards."""
    tree = small.tree(rounds=1) if kind == "text" else tiny_images.tree(tiny_images.npz(tmp_path / "a.npz"), rounds=1)
    config = from_dict(tree)
    run.train(config, tmp_path / "plain", reporter=equal_runs.quiet())
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), torch.device("meta"):
            run.train(config, tmp_path / "odd", reporter=equal_runs.quiet())
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert files(tmp_path / "plain") == files(tmp_path / "odd")


@pytest.fixture(scope="module")
def tied(tmp_path_factory) -> Path:
    return tiny_base.folder(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def test_runs_in_threads_are_those_alone(small, tied, tmp_path):
    """Bases in float32 and bfloat16, with tied heads: while one loads, transformers changes the default dtype and
    suspends tying for all threads."""
    trees = [
        small.tree(seed=seed, rounds=2, base={"name": str(tied), "dtype": dtype})
        for seed, dtype in enumerate(("float32", "bfloat16", "float32"))
    ]
    for number, tree in enumerate(trees):
        run.train(from_dict(tree), tmp_path / f"alone-{number}", reporter=equal_runs.quiet())

    def job(number: int) -> Callable[[], None]:
        return lambda: llm_fed.run(trees[number], out=tmp_path / f"beside-{number}") and None

    together(*map(job, range(len(trees))))
    for number in range(len(trees)):
        assert_same(tmp_path / f"alone-{number}", tmp_path / f"beside-{number}", tolerance=0)


def test_two_threads_and_one_run_folder(small, tmp_path):
    config, said = from_dict(small.tree(rounds=2)), []

    def job() -> None:
        try:
            run.train(config, tmp_path / "run", reporter=equal_runs.quiet())
        except llm_fed.basics.errors.RunError as error:
            said.append(str(error))

    together(job, job)
    assert (tmp_path / "run/summary.json").exists() and len(said) <= 1
    assert all("another thread of this process is writing" in text for text in said), said


def test_a_head_is_tied_while_another_thread_suspends_that(tmp_path, monkeypatch):
    own = tiny_base.folder(tmp_path / "base", tie_word_embeddings=True)  # one that no other test has loaded
    monkeypatch.setattr(PreTrainedModel, "tie_weights", lambda *args, **more: None)  # as transformers does
    model = load_base(BaseConfig(name=str(own), dtype="float32"), "cpu").model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_thread_that_goes_to_another_folder(small, here, monkeypatch):
    """The program around does so in the middle of a run."""
    (here / "elsewhere").mkdir()

    class Moves(Reporter):
        def record(self, record):
            os.chdir(here / "elsewhere")

    run.train(from_dict(small.tree(rounds=2)), Path("run"), reporter=Moves(Console(quiet=True)))
    assert (here / "run/summary.json").exists() and not list((here / "elsewhere").iterdir())


# Locks of other packages


def without_locks(monkeypatch, code: int = errno.ENOLCK) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)


def test_a_cache_on_a_disk_without_locks(tmp_path, monkeypatch):
    without_locks(monkeypatch)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "own").mkdir()
    (tmp_path / "own/train.csv").write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="has no locks; set HF_HOME to a folder on another disk"):
        rows.hub_data(tmp_path / "own")


def test_a_base_whose_cache_has_no_locks():
    error = RuntimeError("cannot be fetched")
    error.__cause__ = OSError(errno.ENOLCK, "No locks available", "a.lock")
    said = explain("Qwen/Qwen3-0.6B", error, "a causal LM")
    assert said.startswith("base.name='Qwen/Qwen3-0.6B' cannot be loaded: the disk of the cache (a.lock) has no locks")
    assert no_locks(ValueError("another")) == ""


def test_a_run_takes_no_lock_of_another_package(tmp_path, monkeypatch):
    """Neither for data, base and scores, nor for the report; its own works on a disk without locks."""

    acquire = filelock.BaseFileLock.acquire

    def taken(self, *arguments, **settings):
        if Path(self.lock_file).name.startswith(lock.NAME):
            return acquire(self, *arguments, **settings)
        raise AssertionError(f"{self.lock_file} was taken")

    monkeypatch.setattr(filelock.BaseFileLock, "acquire", taken)
    without_locks(monkeypatch)
    small = small_run.make(tmp_path)
    for metric in ("rouge1", "exact_match", "squad_f1"):
        config = from_dict(small.tree(rounds=1, eval={"metric": metric, "max_new_tokens": 3}))
        run.train(config, tmp_path / metric, reporter=Reporter(Console(quiet=True)))
        assert (tmp_path / metric / "summary.json").exists()
        assert [path.name for path in Path(tmp_path / metric).glob(".lock*")] == [".lock"]
